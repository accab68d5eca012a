"""Collectives on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import collectives
from hvdlite.base import reduction
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.collectives import (
    describe_allgather,
    describe_allreduce,
    describe_alltoall,
    describe_broadcast,
    describe_reducescatter,
)
from hvdlite.collectives.recorded import RecordedCall
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine import Operation, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.torch.autograd import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Reducescatter,
)
from hvdlite.torch.device_memory import device_array, device_converter
from hvdlite.torch.handles import (
    TensorHandle,
    allreduce_in_place,
    in_place,
    memory_of,
    submit,
    synchronize,
)
from hvdlite.torch.tensors import CONVERSION, on_current_stream, to_array, to_tensor_like

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "join",
]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `allreduce` and return a handle; do not touch the tensor until it is done."""
    factors = prescale_factor, postscale_factor

    def describe(name: str) -> Operation:
        array = to_array(tensor, device_converter([tensor], *factors))
        return describe_allreduce(array, name, reduction.choose(average, op), *factors)

    return submit("allreduce", name, describe, to_tensor_like, tensor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `allreduce_` and return a handle; do not touch the tensor until it is done."""
    return allreduce_in_place(
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
        tensor: Tensor of any shape, the same on all ranks; bool, integers, floats of 16 to 64
            bits; complex for Sum and Average.
        average: Deprecated; True is Average, False is Sum.
        name: Name that pairs this call with those of the other ranks; None pairs by order.
        compression: Strategy for floats.
        op: One of the six reductions; None is Average.
        prescale_factor: Factor for the tensor before the reduction.
        postscale_factor: Factor for the result.
        process_set: The ranks that take part.

    Returns:
        A new tensor, equal to the bit on all ranks.

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype, an operation of this name is still in flight, or this rank is not in the
            process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    name = name or runtime.engine(process_set).unnamed("allreduce")
    strategy = check_strategy(compression, CONVERSION)
    chosen = reduction.choose(average, op)
    call = RecordedCall(
        False, name, process_set, chosen, prescale_factor, postscale_factor, strategy
    )
    result: torch.Tensor = Allreduce.apply(call, tensor)[0]
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
    handle = allreduce_in_place(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, begin=False
    )
    result: torch.Tensor = handle.wait()
    return result


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `allgather` and return a handle; do not touch the tensor until it is done."""

    def describe(name: str) -> Operation:
        return describe_allgather(to_array(tensor, device_array), name)

    return submit("allgather", name, describe, to_tensor_like, tensor, process_set)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along axis 0, in the order of the ranks.

    Gradients flow through it: each rank gets its own slice of the ranks' average gradient
    (the average, as in Horovod, although the sum is the derivative of the ranks' total).

    Args:
        tensor: Tensor whose axes but the first are the same on all ranks; a scalar counts as one
            row.
        name, process_set: As for `allreduce`.

    Raises:
        ValueError, HorovodInternalError: As for `allreduce`.
    """
    name = name or runtime.engine(process_set).unnamed("allgather")
    result: torch.Tensor = Allgather.apply(RecordedCall(False, name, process_set), tensor)[0]
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `broadcast` and return a handle; do not touch the tensor until it is done."""
    engine = runtime.engine(process_set)

    def describe(name: str) -> Operation:
        return describe_broadcast(engine, to_array(tensor, device_array), name, root_rank)

    return submit("broadcast", name, describe, to_tensor_like, tensor, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `broadcast_` and return a handle; do not touch the tensor until it is done."""
    engine = runtime.engine(process_set)

    def describe(name: str) -> Operation:
        array = to_array(tensor, device_array)
        return describe_broadcast(engine, array, name, root_rank, memory_of(tensor, array))

    return submit("broadcast", name, describe, in_place, tensor, process_set)


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
        tensor: Tensor whose shape and dtype are the same on all ranks.
        root_rank: The rank that sends, by its number among all ranks.
        name, process_set: As for `allreduce`.

    Raises:
        ValueError: There is no such rank, an operation of this name is still in flight, or
            this rank is not in the process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    name = name or runtime.engine(process_set).unnamed("broadcast")
    result: torch.Tensor = Broadcast.apply(
        RecordedCall(False, name, process_set), root_rank, tensor
    )
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite a tensor with rank ``root_rank``'s; arguments and errors as `broadcast`."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `alltoall` and return a handle; do not touch the tensor until it is done."""
    engine = runtime.engine(process_set)

    def describe(name: str) -> Operation:
        return describe_alltoall(to_array(tensor, device_array), host_splits(splits), name, engine)

    convert = _rows if splits is None else _rows_and_splits
    return submit("alltoall", name, describe, convert, tensor, process_set)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send every rank some rows of a tensor, and receive some of theirs.

    Gradients flow through it, back to where the rows came from.

    Args:
        tensor: Tensor of at least one axis; all but the first are the same on all ranks.
        splits: Number of rows for each rank that takes part, in their order; they add up to the
            number of rows. None: the same number for all.
        name, process_set: As for `allreduce`.

    Returns:
        The received rows, in the order of the ranks they came from; with ``splits`` given, a
        pair of these and an int32 tensor of how many came from each.

    Raises:
        ValueError: The splits do not fit, an operation of this name is still in flight, or this
            rank is not in the process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    name = name or runtime.engine(process_set).unnamed("alltoall")
    call = RecordedCall(False, name, process_set)
    result, received = Alltoall.apply(call, host_splits(splits), None, tensor)
    return result if splits is None else (result, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorHandle:
    """Start `reducescatter` and return a handle; do not touch the tensor until it is done."""
    factors = prescale_factor, postscale_factor

    def describe(name: str) -> Operation:
        array = to_array(tensor, device_converter([tensor], *factors))
        return describe_reducescatter(array, name, reduction.choose(None, op), *factors)

    return submit("reducescatter", name, describe, to_tensor_like, tensor, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Strategy = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and return this rank's rows of the result.

    Gradients flow through it, for Sum and Average: those of all rows are gathered, and, as in
    Horovod, multiplied by the number of ranks for Sum (although it is Average that divides).

    Args:
        tensor: Tensor of at least one axis, whose shape and dtype are the same on all ranks. The
            first ranks get one row more where the rows cannot be divided evenly.
        name, process_set, prescale_factor, postscale_factor: As for `allreduce`.
        compression: Strategy for floats: ``Compression.none``, ``.fp16`` or ``.bf16``.
        op: Average, Sum, Min, Max or Product.

    Raises:
        ValueError: ``op`` is Adasum or has no meaning for the dtype, an operation of this name is
            still on its way, or this rank is not in the process set.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    name = name or runtime.engine(process_set).unnamed("reducescatter")
    chosen = reduction.choose(None, op)
    call = RecordedCall(
        False, name, process_set, chosen, prescale_factor, postscale_factor, compression
    )
    result: torch.Tensor = Reducescatter.apply(call, tensor)[0]
    return result


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no more data, and wait until all ranks do so.

    See `hvdlite.join`. Joined ranks cannot take part in allreduces of device tensors: these raise
    while a rank has joined.

    Args:
        device: Accepted for compatibility with Horovod, without effect.
        process_set: The ranks that take part.

    Returns:
        The rank that joined last, the same on all.
    """
    return collectives.join(process_set)


def host_splits(splits: Any) -> Any:
    """Return splits on the host."""
    return splits.cpu().numpy() if isinstance(splits, torch.Tensor) else splits


def _rows(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    return _rows_and_splits(result, tensor)[0]


def _rows_and_splits(result: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, received = on_current_stream(result)
    return to_tensor_like(whole, tensor), torch.tensor(received, dtype=torch.int32, device="cpu")
