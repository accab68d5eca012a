"""The collectives on torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import collectives, reduction, runtime, world
from hvdlite.exchange import Compression, Strategy
from hvdlite.reduction import Average, ReduceOp
from hvdlite.torch.device_memory import lend
from hvdlite.torch.handles import TensorHandle, copied, synchronize, written
from hvdlite.torch.in_place import allreduce_handle, memory_of
from hvdlite.torch.tensors import taken, to_array, to_tensor_like


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
    return allreduce_handle(tensor, average, name, op, prescale_factor, postscale_factor)


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
    handle = allreduce_handle(
        tensor, average, name, op, prescale_factor, postscale_factor, begin=False
    )
    return handle.wait()


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
    out = memory_of(tensor, array)
    handle = TensorHandle(name, copied if out is None else written, tensor)
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
