"""What ``schedule=`` takes."""

from __future__ import annotations

from typing import Any

from hvdlite.compression import Reduction, Strategy
from hvdlite.reduction import ReduceOp
from hvdlite.schedule.base import Accumulate, EveryStep, ExchangeSchedule
from hvdlite.schedule.local import DiLoCo, LocalSGD, PartialSync


class Schedule:
    """The schedules that ``schedule=`` takes, the same for every framework.

    An example: ``hvd.DistributedOptimizer(optimizer, schedule=hvd.Schedule.LocalSGD(every=8))``.
    """

    EveryStep = EveryStep
    Accumulate = Accumulate
    PartialSync = PartialSync
    LocalSGD = LocalSGD
    DiLoCo = DiLoCo


def check_schedule(
    schedule: Any,
    strategy: Strategy,
    reduction: Reduction,
    passes: int = 1,
    sparse_as_dense: bool = False,
) -> tuple[ExchangeSchedule | None, int]:
    """Check that a schedule goes together with the other arguments of an optimizer.

    Args:
        schedule: what the user has given; None: every step.
        strategy: how gradients, or weights, travel.
        reduction: sum, average or Adasum.
        passes: backward passes of a step.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.

    Returns:
        The schedule if it has local steps, else None; and the backward passes of a step.

    Raises:
        TypeError: it is no schedule.
        ValueError: it does not go together with another argument.
    """
    if schedule is None or isinstance(schedule, EveryStep):
        return None, passes
    if isinstance(schedule, Accumulate):
        if passes != 1:
            raise ValueError(
                f"{schedule!r} and backward_passes_per_step={passes} mean the same; leave one of "
                "them out"
            )
        return None, schedule.passes
    if not isinstance(schedule, ExchangeSchedule):
        raise TypeError(
            f"schedule={schedule!r} is no schedule; use one of hvd.Schedule, such as "
            "hvd.Schedule.LocalSGD(every=8)"
        )
    _check_local(schedule, strategy, reduction, sparse_as_dense)
    return schedule, passes


def _check_local(
    schedule: ExchangeSchedule, strategy: Strategy, reduction: Reduction, sparse_as_dense: bool
) -> None:
    if reduction.op is not ReduceOp.AVERAGE:
        raise ValueError(
            f"{schedule!r} averages weights, which op=hvd.{reduction.op.name.capitalize()} does "
            "not; leave op or the schedule out"
        )
    if reduction.predivide != 1.0:
        raise ValueError(
            f"gradient_predivide_factor={reduction.predivide} is about gradients, and "
            f"{schedule!r} averages weights; leave one of them out"
        )
    if sparse_as_dense and schedule.is_local(0):
        raise ValueError(
            f"sparse_as_dense=True is about the exchange of gradients, and {schedule!r} exchanges "
            "none; leave it out"
        )
    if not schedule.sends_changes and not strategy.takes_weights:
        raise ValueError(
            f"{schedule!r} averages weights, and {strategy!r} is for gradients only: what it "
            "leaves out or rounds off would be missing from the weights; use "
            "hvd.Compression.none, .fp16 or .bf16, or hvd.Schedule.DiLoCo, which takes any"
        )
