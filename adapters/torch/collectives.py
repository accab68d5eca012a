"""The collectives on torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdlite import collectives, reduction, runtime, world
from hvdlite.engine import Handle
from hvdlite.exchange import Compression, Strategy
from hvdlite.reduction import Average, ReduceOp
from hvdlite.torch.device_memory import lend
from hvdlite.torch.tensors import taken, to_array, to_tensor_like


class TensorHandle(Handle):
    """A collective on its way; `synchronize` turns it into its tensor, once.

    Args:
        name: the operation's.
        convert: makes the tensor of the result and ``tensor``.
        tensor: what was passed to the collective.
    """

    __slots__ = ("_convert", "_tensor")

    def __init__(
        self,
        name: str,
        convert: Callable[[Any, torch.Tensor], torch.Tensor],
        tensor: torch.Tensor,
    ) -> None:
        Handle.__init__(self, name)
        self._convert: Callable[[Any, torch.Tensor], torch.Tensor] | None = convert
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """Wait for the operation and return its tensor.

        Raises:
            ValueError: the handle has been waited for before.
            HorovodInternalError: the operation failed.
        """
        convert, self._convert = self._convert, None
        if convert is None:
            raise ValueError(f"the handle of {self.name!r} has been synchronized before")
        return convert(Handle.wait(self), self._tensor)


def poll(handle: TensorHandle) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return _checked(handle).done()


def synchronize(handle: TensorHandle) -> torch.Tensor:
    """Wait for an asynchronous operation, and return its result.

    Raises:
        ValueError: it is not a handle, or has been synchronized before.
        HorovodInternalError: the operation failed, on this rank or another.
    """
    return _checked(handle).wait()


def _checked(handle: TensorHandle) -> TensorHandle:
    if not isinstance(handle, TensorHandle):
        raise ValueError(f"{handle!r} is not a handle; pass what an ..._async function returned")
    return handle


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorHandle:
    """Start `allreduce` and return a handle; leave the tensor alone until it is done."""
    name = _numbered(name, "allreduce")
    array, handle = to_array(tensor, lend), TensorHandle(name, to_tensor_like, tensor)
    collectives.allreduce_async(
        array, average, name, op, prescale_factor, postscale_factor, handle=handle
    )
    return handle


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorHandle:
    """Start `allreduce_` and return a handle; leave the tensor alone until it is done."""
    name = _numbered(name, "allreduce")
    array = to_array(tensor, lend)
    out = _out(tensor, array)
    handle = TensorHandle(name, _copied if out is None else _written, tensor)
    collectives.allreduce_async(
        array, average, name, op, prescale_factor, postscale_factor, out=out, handle=handle
    )
    return handle


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Strategy = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks: ``postscale * op(prescale * tensor)``.

    Gradients flow through it: they are reduced by the same op. Min, Max and Product have
    no gradient here and raise in the backward pass.

    Args:
        tensor: any shape, alike on all ranks; bool, integers, floats of 16 to 64 bits;
            complex for Sum and Average.
        average: deprecated; True is Average, False is Sum.
        name: pairs this call with those of the other ranks; None: by order.
        compression: how floats travel.
        op: one of the six reductions; None is Average.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        A new tensor, alike to the bit on all ranks.

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype, or an operation of this name is still on its way.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = _numbered(name, "allreduce")
    chosen = reduction.choose(average, op)
    result: torch.Tensor = _Allreduce.apply(
        tensor, name, compression, chosen, prescale_factor, postscale_factor
    )
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place; arguments and errors as in `allreduce`."""
    name = _numbered(name, "allreduce")
    array = to_array(tensor, lend)
    out = _out(tensor, array)
    result = collectives.allreduce(
        array, average, name, op, prescale_factor, postscale_factor, out=out
    )
    return (_copied if out is None else _written)(result, tensor)


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> TensorHandle:
    """Start `allgather` and return a handle; leave the tensor alone until it is done."""
    name = _numbered(name, "allgather")
    array, handle = to_array(tensor, lend), TensorHandle(name, to_tensor_like, tensor)
    collectives.allgather_async(array, name, handle=handle)
    return handle


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along axis 0, in the order of the ranks.

    Gradients flow through it: each rank gets its own slice of the ranks' average gradient
    (the average, as in Horovod, although the sum is the derivative of the ranks' total).

    Args:
        tensor: all axes but the first alike on all ranks; a scalar counts as one row.
        name: pairs this call with those of the other ranks; None: by order.

    Raises:
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = _numbered(name, "allgather")
    result: torch.Tensor = _Allgather.apply(tensor, name)
    return result


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> TensorHandle:
    """Start `broadcast` and return a handle; leave the tensor alone until it is done."""
    name = _numbered(name, "broadcast")
    array, handle = to_array(tensor, lend), TensorHandle(name, to_tensor_like, tensor)
    collectives.broadcast_async(array, root_rank, name, handle=handle)
    return handle


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> TensorHandle:
    """Start `broadcast_` and return a handle; leave the tensor alone until it is done."""
    name = _numbered(name, "broadcast")
    array = to_array(tensor, lend)
    out = _out(tensor, array)
    handle = TensorHandle(name, _copied if out is None else _written, tensor)
    collectives.broadcast_async(array, root_rank, name, out=out, handle=handle)
    return handle


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return rank ``root_rank``'s tensor on all ranks.

    Gradients flow through it: the root gets the ranks' average gradient, as in Horovod,
    the others zeros.

    Args:
        tensor: shape and dtype alike on all ranks.
        root_rank: the rank whose values count.
        name: pairs this call with those of the other ranks; None: by order.

    Raises:
        ValueError: there is no such rank.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = _numbered(name, "broadcast")
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)
    return result


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite a tensor with rank ``root_rank``'s; arguments and errors as `broadcast`."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def _numbered(name: str | None, kind: str) -> str:
    # Before anything can be refused: a refusal must not shift the names of later calls.
    return name or runtime.engine().unnamed(kind)


def _out(tensor: torch.Tensor, array: Any) -> Any:
    """The array itself where a result can be written straight into the tensor's memory."""
    if tensor.is_cpu:
        return array if array.flags.c_contiguous else None
    lent = getattr(array, "tensor", None)
    return array if lent is not None and lent.data_ptr() == tensor.data_ptr() else None


def _copied(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which takes over a result that lies elsewhere."""
    with torch.no_grad():
        return tensor.copy_(to_tensor_like(result, tensor))


def _written(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which a result has been written to."""
    if not tensor.is_cpu:
        taken(result)
    # torch did not see the write: views and saved tensors must know of it.
    torch.autograd.graph.increment_version(tensor)
    return tensor


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> torch.Tensor:
        ctx.arguments = name, compression, op, prescale, postscale
        on_device = getattr(compression, "on_device", False)
        result = collectives.allreduce(
            to_array(tensor, lend if on_device else None),
            name=name,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=compression,
        )
        return to_tensor_like(result, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, compression, op, prescale, postscale = ctx.arguments
        if op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            raise NotImplementedError(
                f"allreduce with op={op.name.capitalize()} has no gradient; detach its input, "
                "or use Sum or Average"
            )
        reduced = allreduce(
            gradients[0], None, _gradient_name(name), compression, op, prescale, postscale
        )
        return reduced, None, None, None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name, ctx.shape = name, tensor.shape
        handle = collectives.allgather_rows_async(to_array(tensor, lend), name)
        whole, rows = taken(handle.wait())
        ctx.start = sum(rows[: world.rank()])
        ctx.rows = rows[world.rank()]
        return to_tensor_like(whole, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = allreduce(gradients[0], name=_gradient_name(ctx.name), op=Average)
        return reduced.narrow(0, ctx.start, ctx.rows).reshape(ctx.shape), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str) -> torch.Tensor:
        ctx.root_rank, ctx.name = root_rank, name
        return to_tensor_like(
            collectives.broadcast(to_array(tensor, lend), root_rank, name), tensor
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = allreduce(gradients[0], name=_gradient_name(ctx.name), op=Average)
        own = reduced if world.rank() == ctx.root_rank else torch.zeros_like(reduced)
        return own, None, None


def _gradient_name(name: str) -> str:
    return f"{name}.gradient"
