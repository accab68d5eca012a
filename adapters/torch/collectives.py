"""The collectives on torch tensors."""

from __future__ import annotations

import torch

from hvdlite import collectives, reduction, runtime
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp
from hvdlite.torch import autograd
from hvdlite.torch.device_memory import lend, lender
from hvdlite.torch.handles import TensorHandle, copied, synchronize, written
from hvdlite.torch.in_place import allreduce_handle, memory_of
from hvdlite.torch.tensors import CONVERSION, to_array, to_tensor_like


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `allreduce` and return a handle; leave the tensor alone until it is done."""
    name = numbered(name, "allreduce", process_set)
    array = to_array(tensor, lender([tensor], prescale_factor, postscale_factor))
    handle = TensorHandle(name, to_tensor_like, tensor)
    collectives.allreduce_async(
        array,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set=process_set,
        handle=handle,
    )
    return handle


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `allreduce_` and return a handle; leave the tensor alone until it is done."""
    return allreduce_handle(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Strategy = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
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
        process_set: the ranks that take part.

    Returns:
        A new tensor, alike to the bit on all ranks.

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype, an operation of this name is still on its way, or this rank is not in the
            process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = numbered(name, "allreduce", process_set)
    chosen = reduction.choose(average, op)
    factors = prescale_factor, postscale_factor
    result: torch.Tensor = autograd.Allreduce.apply(
        tensor, name, check_strategy(compression, CONVERSION), chosen, *factors, process_set
    )
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place; arguments and errors as in `allreduce`."""
    handle = allreduce_handle(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, begin=False
    )
    return handle.wait()


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `allgather` and return a handle; leave the tensor alone until it is done."""
    name = numbered(name, "allgather", process_set)
    array, handle = to_array(tensor, lend), TensorHandle(name, to_tensor_like, tensor)
    collectives.allgather_async(array, name, process_set=process_set, handle=handle)
    return handle


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along axis 0, in the order of the ranks.

    Gradients flow through it: each rank gets its own slice of the ranks' average gradient
    (the average, as in Horovod, although the sum is the derivative of the ranks' total).

    Args:
        tensor: all axes but the first alike on all ranks; a scalar counts as one row.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        ValueError: an operation of this name is still on its way, or this rank is not in the
            process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = numbered(name, "allgather", process_set)
    result: torch.Tensor = autograd.Allgather.apply(tensor, name, process_set)
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `broadcast` and return a handle; leave the tensor alone until it is done."""
    name = numbered(name, "broadcast", process_set)
    array, handle = to_array(tensor, lend), TensorHandle(name, to_tensor_like, tensor)
    collectives.broadcast_async(array, root_rank, name, process_set=process_set, handle=handle)
    return handle


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `broadcast_` and return a handle; leave the tensor alone until it is done."""
    name = numbered(name, "broadcast", process_set)
    array = to_array(tensor, lend)
    out = memory_of(tensor, array)
    handle = TensorHandle(name, copied if out is None else written, tensor)
    collectives.broadcast_async(
        array, root_rank, name, out=out, process_set=process_set, handle=handle
    )
    return handle


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return rank ``root_rank``'s tensor on all ranks.

    Gradients flow through it: the root gets the ranks' average gradient, as in Horovod,
    the others zeros.

    Args:
        tensor: shape and dtype alike on all ranks.
        root_rank: the rank whose values count, by its number among all ranks.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such rank, an operation of this name is still on its way, or
            this rank is not in the process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = numbered(name, "broadcast", process_set)
    result: torch.Tensor = autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite a tensor with rank ``root_rank``'s; arguments and errors as `broadcast`."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Tell that this rank has no more data, and wait until all ranks do so.

    See `hvdlite.join`. Tensors on devices cannot be stood in for: their allreduces raise while a
    rank has joined.

    Args:
        device: accepted for Horovod's sake, without effect.
        process_set: the ranks that take part.

    Returns:
        The rank that joined last, the same on all.
    """
    return collectives.join(process_set)


def numbered(name: str | None, kind: str, process_set: ProcessSet) -> str:
    """The name of an operation, or the next one for those that the user gave none.

    It is asked for before anything can be refused: a refusal must not shift later names.
    """
    return name or runtime.engine(process_set).unnamed(kind)
