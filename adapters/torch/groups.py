"""Grouped collectives on lists of torch tensors, which run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.base import reduction
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.collectives import (
    describe_allgather,
    describe_allreduce,
    describe_group,
    describe_reducescatter,
)
from hvdlite.collectives.recorded import RecordedCall, members
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine import Operation, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.torch.autograd import Allgather, Allreduce, Reducescatter
from hvdlite.torch.device_memory import device_array, device_converter
from hvdlite.torch.handles import TensorHandle, copy_result, mark_written, submit, synchronize
from hvdlite.torch.persistent import memory_of
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
    factors = prescale_factor, postscale_factor
    return _allreduce(tensors, average, name, op, factors, process_set, in_place=False)


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
    factors = prescale_factor, postscale_factor
    return _allreduce(tensors, average, name, op, factors, process_set, in_place=True)


def _allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    in_place: bool,
) -> TensorHandle:
    has_out: list[bool] = []  # for each tensor, whether the result is written to its memory

    def prepare(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor, str], Operation]:
        on_device = device_converter(tensors, *factors)
        chosen = reduction.choose(average, op)

        def describe(tensor: torch.Tensor, member: str) -> Operation:
            array = to_array(tensor, on_device)
            out = memory_of(tensor, array) if in_place else None
            has_out.append(out is not None)
            return describe_allreduce(array, member, chosen, *factors, out=out)

        return describe

    def convert(results: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            mark_written(result, tensor) if is_written else copy_result(result, tensor)
            for result, tensor, is_written in zip(
                on_current_stream(results), tensors, has_out, strict=True
            )
        ]

    return _submit("allreduce", name, tensors, prepare, process_set, convert if in_place else _like)


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

    def describe(tensor: torch.Tensor, member: str) -> Operation:
        return describe_allgather(to_array(tensor, device_array), member)

    return _submit("allgather", name, tensors, lambda tensors: describe, process_set)


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
    factors = prescale_factor, postscale_factor

    def prepare(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor, str], Operation]:
        on_device = device_converter(tensors, *factors)
        chosen = reduction.choose(None, op)
        return lambda tensor, member: describe_reducescatter(
            to_array(tensor, on_device), member, chosen, *factors
        )

    return _submit("reducescatter", name, tensors, prepare, process_set)


def _submit(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    prepare: Callable[[list[torch.Tensor]], Callable[[torch.Tensor, str], Operation]],
    process_set: ProcessSet,
    convert: Callable[[Any, Any], Any] | None = None,
) -> TensorHandle:
    """Submit a group; ``prepare`` returns what describes a member, given all tensors."""
    listed: list[torch.Tensor] = []

    def describe(name: str) -> Operation:
        listed.extend(members(tensors, torch.Tensor))
        return describe_group(f"grouped {kind}", name, listed, prepare(listed))

    return submit(f"grouped_{kind}", name, describe, convert or _like, listed, process_set)


def _like(results: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(to_tensor_like, on_current_stream(results), tensors))
