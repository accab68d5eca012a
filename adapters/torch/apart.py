"""The reduction of gradients that have no place in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvdlite.process_sets import ProcessSet
from hvdlite.reduction import ReduceOp
from hvdlite.torch.collectives import allreduce_async
from hvdlite.torch.sparse import empty_like, sparse_allreduce_async


class Apart(NamedTuple):
    """A parameter with a gradient that is sparse, or was so before.

    Attributes:
        name: of its exchange, the same on all ranks.
        parameter: as it is.
        gradient: of this rank; None: it counts as zeros.
        sparse_axes: how many of its axes are sparse on the ranks that have one; None: they have
            dense ones.
    """

    name: str
    parameter: torch.Tensor
    gradient: torch.Tensor | None
    sparse_axes: int | None


def reduce_apart(members: Sequence[Apart], op: ReduceOp, process_set: ProcessSet) -> None:
    """Write reduced gradients into parameters' ``grad``; all ranks do it for the same ones.

    Raises:
        HorovodInternalError: the ranks disagree, or communication failed; after the last has
            been waited for.
    """
    waits = [_start(member, op, process_set) for member in members]
    errors: list[Exception] = []
    for member, wait in zip(members, waits, strict=True):
        try:
            member.parameter.grad = wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _start(member: Apart, op: ReduceOp, process_set: ProcessSet) -> Callable[[], torch.Tensor]:
    name, parameter, gradient, sparse_axes = member
    if sparse_axes is not None:
        own = empty_like(parameter, sparse_axes) if gradient is None else gradient
        return sparse_allreduce_async(own, name, op, process_set)
    own = torch.zeros_like(parameter) if gradient is None else gradient
    return allreduce_async(own.detach(), name=name, op=op, process_set=process_set).wait
