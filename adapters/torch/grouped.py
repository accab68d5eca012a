"""The collectives on lists of torch tensors, which run as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import grouped, reduction
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.torch import autograd
from hvdlite.torch.collectives import numbered
from hvdlite.torch.device_memory import lend, lender
from hvdlite.torch.handles import TensorHandle, copied, synchronize, written
from hvdlite.torch.in_place import memory_of
from hvdlite.torch.tensors import CONVERSION, taken, to_array, to_tensor_like


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

    None is reduced before every rank has submitted all, and if one is refused, all are.

    Args:
        tensors: one at least, of any shapes and dtypes, alike on all ranks.

    Returns:
        New tensors.

    Raises:
        ValueError: as `allreduce`; there is no tensor.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = numbered(name, "grouped_allreduce", process_set)
    chosen = reduction.choose(average, op)
    factors = prescale_factor, postscale_factor
    strategy = check_strategy(compression, CONVERSION)
    arguments = name, strategy, chosen, *factors, process_set
    return list(autograd.GroupedAllreduce.apply(*arguments, *_checked(tensors)))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `grouped_allreduce` and return one handle; leave the tensors alone until then."""
    name = numbered(name, "grouped_allreduce", process_set)
    handle = TensorHandle(name, _like, _checked(tensors))
    lends = lender(tensors, prescale_factor, postscale_factor)
    grouped.grouped_allreduce_async(
        [to_array(tensor, lends) for tensor in tensors],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set=process_set,
        handle=handle,
    )
    return handle


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
    return synchronize(handle)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `grouped_allreduce_` and return one handle; leave the tensors alone until then."""
    name = numbered(name, "grouped_allreduce", process_set)
    lends = lender(tensors, prescale_factor, postscale_factor)
    arrays = [to_array(tensor, lends) for tensor in _checked(tensors)]
    outs = [memory_of(*pair) for pair in zip(tensors, arrays, strict=True)]
    handle = TensorHandle(name, _In(outs), list(tensors))
    grouped.grouped_allreduce_async(
        arrays,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        outs=outs,
        process_set=process_set,
        handle=handle,
    )
    return handle


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors as one unit; see `allgather` and `grouped_allreduce`."""
    name = numbered(name, "grouped_allgather", process_set)
    return list(autograd.GroupedAllgather.apply(name, process_set, *_checked(tensors)))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `grouped_allgather` and return one handle; leave the tensors alone until then."""
    name = numbered(name, "grouped_allgather", process_set)
    handle = TensorHandle(name, _like, _checked(tensors))
    arrays = [to_array(tensor, lend) for tensor in tensors]
    grouped.grouped_allgather_async(arrays, name, process_set=process_set, handle=handle)
    return handle


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
    name = numbered(name, "grouped_reducescatter", process_set)
    factors = prescale_factor, postscale_factor
    arguments = name, compression, reduction.choose(None, op), *factors, process_set
    return list(autograd.GroupedReducescatter.apply(*arguments, *_checked(tensors)))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorHandle:
    """Start `grouped_reducescatter` and return one handle; leave the tensors alone until then."""
    name = numbered(name, "grouped_reducescatter", process_set)
    handle = TensorHandle(name, _like, _checked(tensors))
    factors = prescale_factor, postscale_factor
    lends = lender(tensors, *factors)
    arrays = [to_array(tensor, lends) for tensor in tensors]
    grouped.grouped_reducescatter_async(
        arrays, name, op, *factors, process_set=process_set, handle=handle
    )
    return handle


def _checked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError("expected a list of tensors, found a tensor")
    listed = list(tensors)
    if not listed:
        raise ValueError("a grouped collective needs one tensor at least; found none")
    return listed


def _like(results: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(to_tensor_like, taken(results), tensors))


class _In:
    """Delivers the results of a group to tensors.

    Args:
        outs: for each tensor its own memory, if a result has been written there.
    """

    def __init__(self, outs: Sequence[Any]) -> None:
        self._outs = outs

    def __call__(self, results: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            copied(result, tensor) if out is None else written(result, tensor)
            for result, tensor, out in zip(taken(results), tensors, self._outs, strict=True)
        ]
