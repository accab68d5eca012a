"""The arguments of a distributed Keras optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite import runtime
from hvdlite.arguments import check_count
from hvdlite.compression import Conversion, Reduction, Strategy, check_groups
from hvdlite.process_sets import ProcessSet, global_process_set, is_outside
from hvdlite.reduction import ReduceOp
from hvdlite.schedule import CompressionArgument, ExchangeSchedule, check_exchange

#: What messages call the exchange of any optimizer's gradients: ranks whose lists of variables
#: differ meet under it and learn in what.
LABEL = "DistributedOptimizer of Keras"


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged.

    Attributes:
        strategy: how they travel.
        reduction: sum or average.
        sparse_as_dense: make dense gradients of sparse ones.
        passes: backward passes whose gradients add up before an exchange.
        average_passes: whether these are averaged, and not summed.
        scale_local: divide gradients that are not exchanged by the number of ranks.
        process_set: the ranks that take part.
        schedule: which steps are local, and what is exchanged when; None: no step is.
    """

    strategy: Strategy
    reduction: Reduction
    sparse_as_dense: bool
    passes: int
    average_passes: bool
    scale_local: bool
    process_set: ProcessSet
    schedule: ExchangeSchedule | None = None

    @property
    def pass_factor(self) -> int:
        """What gradients are multiplied by where Keras averages over the passes."""
        return 1 if self.average_passes else self.passes

    @property
    def replicates(self) -> bool:
        """Return whether weights have to be the same on all ranks."""
        return self.schedule is None and self.reduction.op is not ReduceOp.ADASUM


def check_options(
    compression: CompressionArgument,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: ReduceOp | int,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    num_groups: int,
    groups: int | list[Any] | None,
    process_set: ProcessSet,
    scale_local_gradients: bool,
    conversion: Conversion,
    schedule: ExchangeSchedule | None = None,
) -> Options:
    """Check the arguments of `DistributedOptimizer`, and put them together.

    Raises:
        ValueError: one is out of range, the process set is not registered, or the schedule does not
            go together with another one.
        TypeError: ``compression`` is no strategy, or ``schedule`` is no schedule.
    """
    check_groups(num_groups, groups)
    if process_set is not global_process_set and not is_outside(process_set):
        runtime.engine(process_set)
    check_count("backward_passes_per_step", backward_passes_per_step)
    reduction = Reduction(ReduceOp(op), gradient_predivide_factor)
    strategy, chosen, passes = check_exchange(
        compression,
        schedule,
        conversion,
        reduction,
        int(backward_passes_per_step),
        sparse_as_dense,
    )
    if chosen is not None and passes > 1:
        raise ValueError(
            f"backward_passes_per_step={passes}, and with {chosen!r} a step is what Keras "
            "applies; leave one of them out"
        )
    return Options(
        strategy,
        reduction,
        sparse_as_dense,
        passes,
        average_aggregated_gradients,
        scale_local_gradients,
        process_set,
        chosen,
    )


def check_steps(options: Options, adds_up: bool, scales: bool) -> None:
    """Refuse optimizers whose calls are not all steps, where ranks step by themselves.

    Args:
        options: of the optimizer.
        adds_up: whether Keras adds up gradients of several calls.
        scales: whether it scales the loss, and leaves out steps that overflow.

    Raises:
        ValueError: there is a schedule of local steps, and one of the two is so.
    """
    if options.schedule is None:
        return
    if adds_up:
        raise ValueError(
            f"{options.schedule!r} with gradient_accumulation_steps: in local steps gradients cost "
            "no exchange; leave gradient_accumulation_steps out, and take larger batches"
        )
    if scales:
        raise ValueError(
            f"a LossScaleOptimizer leaves out the step of a rank whose gradients overflow, and "
            f"with {options.schedule!r} the others would wait for it; use mixed_bfloat16, which "
            "needs no loss scaling, or leave out the schedule"
        )


def check_unweighted(options: Options, adds_up: bool, batch_size: Any) -> None:
    """Refuse a number of samples where a call is no step of all ranks' gradients.

    Args:
        options: of the optimizer.
        adds_up: whether gradients of several calls add up before an exchange.
        batch_size: what was given.

    Raises:
        ValueError: there is a schedule of local steps, or they add up.
    """
    if batch_size is None:
        return
    if options.schedule is not None:
        raise ValueError(
            "batch_size weights the gradients of all ranks, and with a schedule each rank steps on "
            "its own; leave it out"
        )
    if adds_up:
        raise ValueError(
            "batch_size weights the gradients of one call, and here those of several add up before "
            "they are exchanged; leave out backward_passes_per_step and "
            "gradient_accumulation_steps, or batch_size"
        )
