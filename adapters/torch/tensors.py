"""Views of torch tensors as numpy arrays and back, without a copy in host memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hvdlite.compression import Conversion
from hvdlite.compression.custom import cast
from hvdlite.engine import Lane
from hvdlite.engine.device import DeviceArray, DeviceResult

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Exports a tensor as numpy 2.1 imports it; neither public nor in all releases of torch. Without it
# `Tensor.numpy` takes its place, which keeps the storage from being resized ever after.
_export: Any = getattr(torch._C, "_to_dlpack_versioned", None)
_can_export = _export is not None and np.lib.NumpyVersion(np.__version__) >= "2.1.0"
_PLAIN = {torch.Tensor, torch.nn.Parameter}  # other classes may have no memory of their own
_CPU = 1, 0  # the device, in DLPack's numbers


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the numpy dtype of a torch dtype; bfloat16 is that of ``ml_dtypes``."""
    if dtype == torch.bfloat16:
        return _BFLOAT16
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype of a numpy dtype."""
    return to_tensor(np.empty(0, dtype)).dtype


def to_array(
    tensor: torch.Tensor, on_device: Callable[[torch.Tensor], DeviceArray | None] | None = None
) -> Any:
    """View a dense tensor as a numpy array of the same shape and strides.

    The array keeps the tensor alive; where it may outlive the tensor, pass ``tensor.detach()``,
    with which it keeps the memory alone. The tensor's storage can still be resized: its old memory
    is gone then, and the array must not be used any more. A tensor on an accelerator is copied to
    the host first, unless ``on_device`` takes it.

    Raises:
        TypeError: it is not a dense tensor, or of a dtype that numpy cannot hold.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"expected a torch.Tensor, found {type(tensor).__name__}; use torch.as_tensor(...)"
        )
    if tensor.is_cpu:
        try:
            return _view(tensor)  # nearly always; what has to be done otherwise takes longer
        except (TypeError, RuntimeError, BufferError):
            pass
    check_whole(tensor)
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense tensor, found {tensor.layout}; call .to_dense() first")
    if tensor.is_meta:
        raise TypeError(
            f"expected a tensor with values, found {_described(tensor)} on the device meta, which "
            "holds none; give it memory first, by .to_empty(device=...) of its module, say"
        )
    if tensor.is_quantized or (tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point):
        raise TypeError(
            f"{_described(tensor)} cannot be exchanged; convert it first, by "
            f"{'.dequantize()' if tensor.is_quantized else '.float()'}"
        )
    host = tensor.detach() if tensor.requires_grad else tensor
    array = None if on_device is None or host.is_cpu else on_device(host)
    if array is not None:
        return array
    host = host.cpu().resolve_conj().resolve_neg()
    if host.dtype == torch.bfloat16:
        return _view(host.view(torch.int16)).view(_BFLOAT16)
    return _view(host)


def check_whole(*tensors: torch.Tensor) -> None:
    """Raise TypeError if a tensor is a DTensor, of which each rank has a part of its own."""
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            raise TypeError(
                f"expected a whole tensor, found a DTensor of shape {list(tensor.shape)}, of which "
                "each rank may have another part; FSDP2 and tensor parallelism exchange what has "
                "to be by themselves, and torch.distributed.checkpoint saves it: leave this call "
                "out, or pass .full_tensor()"
            )


class _Memory:
    """The memory of a tensor, for numpy."""

    __slots__ = ("tensor",)
    tensor: torch.Tensor

    def __dlpack__(
        self, dl_device: object = None, copy: object = None, max_version: object = None
    ) -> object:
        return _export(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


def _view(tensor: torch.Tensor) -> Any:
    """View the elements of a tensor that lie in memory as they are."""
    if not _can_export or type(tensor) not in _PLAIN or tensor.is_conj() or tensor.is_neg():
        return tensor.numpy()
    if tensor._is_zerotensor():  # which has no memory
        return tensor.numpy(force=True)
    memory: Any = _Memory()
    memory.tensor = tensor
    return np.from_dlpack(memory)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether memory holds a tensor's elements, in order: no conjugates or negatives."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of {tensor.dtype} and shape {list(tensor.shape)}"


def to_tensor(array: Any) -> torch.Tensor:
    """View a writable numpy array as a tensor on the host."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_tensor_like(array: Any, like: torch.Tensor) -> torch.Tensor:
    """Do what `to_tensor` does, on the device of ``like``; device results stay where they are."""
    if like.is_cpu:
        return to_tensor(array)
    array = on_current_stream(array)
    return array if isinstance(array, torch.Tensor) else to_tensor(array).to(like.device)


def leaf_to_tensor(leaf: Any) -> Any:
    """Return a tensor in the place of an array, for torch to save; anything else as it is."""
    return to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def leaf_to_array(leaf: Any) -> Any:
    """Return an array in the place of a tensor; anything else as it is."""
    return to_array(leaf) if isinstance(leaf, torch.Tensor) else leaf


def convert(values: Any, out: Any) -> None:
    """Convert between float32 and 16-bit floats, as `float16.use` has it."""
    to_tensor(out).copy_(to_tensor(values))


#: Of tensors that a compression class of the user's own gets and returns.
CONVERSION = Conversion(to_tensor, to_array)


@cast.register
def _cast(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return tensor.to(wanted) if tensor.is_floating_point() else tensor


def on_current_stream(result: Any) -> Any:
    """Return a collective's result, ready for the current stream if it is on a device."""
    return result.take() if isinstance(result, DeviceResult) else result


# Since torch 2.10 gradients may be of another dtype than their parameter.
_GRADIENT_DTYPE = "grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype"
#: Returns the dtype of a parameter's gradients; None: they may be of any.
gradient_dtype: Callable[[torch.Tensor], torch.dtype | None] = operator.attrgetter(_GRADIENT_DTYPE)
_properties = operator.attrgetter("dtype", "is_cuda", "shape", _GRADIENT_DTYPE)


def properties_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the properties that an exchange depends on and ``model.double()`` changes, fast."""
    return [*map(_properties, tensors)]


def places_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what changes whenever `properties_of` does, in a third of its time; or nothing."""
    try:
        places: list[Any] = [*map(torch.Tensor.data_ptr, tensors)]
    except RuntimeError:  # a class of tensors without memory of their own
        return []
    return [*places, *map(gradient_dtype, tensors)]


def share(tensor: torch.Tensor, lane: Lane) -> bool:
    """Move a tensor to memory that a lane exchanges fastest, with all that views it.

    Returns:
        Whether it lies there now: not if it is a part of other memory, or of memory that torch does
        not manage, or shares with other processes.
    """
    storage: Any = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.itemsize
    is_whole = tensor.is_cpu and tensor.is_contiguous() and storage.nbytes() == nbytes
    if not (is_whole and storage.resizable() and hasattr(storage, "_swap_data_ptr_")):
        return False
    if storage.is_shared():
        return False
    memory = torch.from_numpy(lane.empty(nbytes, np.dtype(np.uint8))).untyped_storage()
    memory.copy_(storage)
    storage._swap_data_ptr_(memory)
    return True
