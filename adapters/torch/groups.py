"""Grouped collectives on lists of torch tensors, which run as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvdlite import collectives
from hvdlite.base import reduction
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.collectives.recorded import RecordedCall, members
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.torch.autograd import Allgather, Allreduce, Reducescatter
from hvdlite.torch.device_memory import device_converter
from hvdlite.torch.handles import TensorHandle, in_place, memory_of, synchronize
from hvdlite.torch.tensors import CONVERSION, on_current_stream, to_array, to_tensor_like

__all__ = [
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Strategy = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over all ranks as one unit; see `allreduce`.

    No tensor is reduced before every rank has submitted all, and if one is refused, all are.

    Args:
        tensors: One tensor at least, of any shapes and dtypes, the same on all ranks.

    Returns:
        New tensors.

    Raises:
        ValueError, HorovodInternalError: As `allreduce`; there is no tensor.
    """
    name = name or runtime.engine(process_set).unnamed("grouped_allreduce")
    chosen = reduction.choose(average, op)
    strategy = check_strategy(compression, CONVERSION)
    call = RecordedCall(
        True, name, process_set, chosen, prescale_factor, postscale_factor, strategy
    )
    return list(Allreduce.apply(call, *members(tensors, torch.Tensor)))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `grouped_allreduce` and return one handle; do not touch the tensors until then."""
    listed: list[torch.Tensor] = []
    factors = prescale_factor, postscale_factor
    handle = collectives.grouped_allreduce_async(
        _arrays(tensors, listed, *factors), average, name, op, *factors, process_set=process_set
    )
    return TensorHandle(handle, _like, listed)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do `grouped_allreduce` in place, and return the tensors."""
    factors = prescale_factor, postscale_factor
    handle = grouped_allreduce_async_(tensors, average, name, op, *factors, process_set)
    results: list[torch.Tensor] = synchronize(handle)
    return results


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `grouped_allreduce_` and return one handle; do not touch the tensors until then."""
    listed: list[torch.Tensor] = []
    outs: list[Any] = []  # known once the tensors are read
    factors = prescale_factor, postscale_factor

    def arrays() -> Iterator[Any]:
        for array in _arrays(tensors, listed, *factors):
            outs.append(memory_of(listed[len(outs)], array))
            yield array

    handle = collectives.grouped_allreduce_async(
        arrays(), average, name, op, *factors, outs=outs, process_set=process_set
    )
    return TensorHandle(handle, _in_place, listed)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors as one unit; see `allgather` and `grouped_allreduce`."""
    name = name or runtime.engine(process_set).unnamed("grouped_allgather")
    return list(
        Allgather.apply(RecordedCall(True, name, process_set), *members(tensors, torch.Tensor))
    )


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `grouped_allgather` and return one handle; do not touch the tensors until then."""
    listed: list[torch.Tensor] = []
    handle = collectives.grouped_allgather_async(
        _arrays(tensors, listed), name, process_set=process_set
    )
    return TensorHandle(handle, _like, listed)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Strategy = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do `reducescatter` for several tensors as one unit; see `grouped_allreduce`."""
    name = name or runtime.engine(process_set).unnamed("grouped_reducescatter")
    chosen = reduction.choose(None, op)
    call = RecordedCall(
        True, name, process_set, chosen, prescale_factor, postscale_factor, compression
    )
    return list(Reducescatter.apply(call, *members(tensors, torch.Tensor)))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorHandle:
    """Start `grouped_reducescatter` and return one handle; do not touch the tensors until then."""
    listed: list[torch.Tensor] = []
    factors = prescale_factor, postscale_factor
    handle = collectives.grouped_reducescatter_async(
        _arrays(tensors, listed, *factors), name, op, *factors, process_set=process_set
    )
    return TensorHandle(handle, _like, listed)


def _arrays(
    tensors: Sequence[torch.Tensor], listed: list[torch.Tensor], *factors: float
) -> Iterator[Any]:
    """List the tensors of a group, and yield their arrays, once the group has its name."""
    listed += members(tensors, torch.Tensor)
    on_device = device_converter(listed, *factors)
    for tensor in listed:
        yield to_array(tensor, on_device)


def _like(results: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(to_tensor_like, on_current_stream(results), tensors))


def _in_place(results: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(in_place, on_current_stream(results), tensors))
