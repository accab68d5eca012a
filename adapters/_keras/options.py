"""The arguments of a distributed Keras optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite import runtime
from hvdlite.exchange import Conversion, Reduction, Strategy, check_groups, check_strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp

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
    """

    strategy: Strategy
    reduction: Reduction
    sparse_as_dense: bool
    passes: int
    average_passes: bool
    scale_local: bool
    process_set: ProcessSet

    @property
    def pass_factor(self) -> int:
        """What gradients are multiplied by where Keras averages over the passes."""
        return 1 if self.average_passes else self.passes


def check_options(
    compression: Strategy,
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
) -> Options:
    """Check the arguments of `DistributedOptimizer`, and put them together.

    Raises:
        ValueError: one is out of range, or this rank is not in the process set.
        TypeError: ``compression`` is no strategy.
    """
    check_groups(num_groups, groups)
    if process_set is not global_process_set:
        runtime.engine(process_set)
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step} is not a whole number above 0"
        )
    return Options(
        check_strategy(compression, conversion),
        Reduction(ReduceOp(op), gradient_predivide_factor),
        sparse_as_dense,
        int(backward_passes_per_step),
        average_aggregated_gradients,
        scale_local_gradients,
        process_set,
    )
