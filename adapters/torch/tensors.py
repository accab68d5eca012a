"""torch tensors as numpy arrays and back, without a copy where both lie in host memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype of a torch dtype; bfloat16 is ``ml_dtypes``'."""
    if dtype == torch.bfloat16:
        return _BFLOAT16
    return torch.empty(0, dtype=dtype).numpy().dtype


def to_array(tensor: torch.Tensor) -> Any:
    """View a dense tensor as a numpy array of the same shape and strides.

    A tensor on an accelerator is copied to the host first.

    Raises:
        TypeError: it is not a dense tensor, or of a dtype that numpy cannot hold.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"expected a torch.Tensor, found {type(tensor).__name__}; use torch.as_tensor(...)"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense tensor, found {tensor.layout}; call .to_dense() first")
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(_BFLOAT16)
    return host.numpy()


def to_tensor(array: Any) -> torch.Tensor:
    """View a writable numpy array as a tensor on the host."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_tensor_like(array: Any, like: torch.Tensor) -> torch.Tensor:
    """As `to_tensor`, on the device of ``like``."""
    return to_tensor(array).to(like.device)
