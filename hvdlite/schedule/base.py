"""What a schedule is, and the two in which every step is one of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.arguments import check_count
from hvdlite.compression import Parameter


class ExchangeSchedule:
    """When ranks exchange what; a value, whose settings are compared across ranks.

    Ranks exchange gradients before a step, or, where a step is *local*, weights after it.
    """

    #: Whether the change of the weights since the last exchange travels, and not the weights.
    sends_changes: bool = False
    #: The outer learning rate and the outer momentum by which such changes are applied.
    outer: tuple[float, float] = (1.0, 0.0)
    #: Whether a rank that has missed an exchange, because it had joined, is no use in the next.
    remembers: bool = False
    #: Whether the optimizer's state is averaged with the weights.
    momentum: bool = False

    def is_local(self, steps: int) -> bool:
        """Whether the step after so many steps is made by each rank on its own gradients."""
        return False

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        """Return the numbers of the parameters that ranks exchange when so many steps are done."""
        return ()

    def __repr__(self) -> str:
        return f"Schedule.{type(self).__name__}()"


@dataclass(frozen=True, repr=False)
class EveryStep(ExchangeSchedule):
    """Gradients are exchanged before every step, as without a schedule."""


@dataclass(frozen=True)
class Accumulate(ExchangeSchedule):
    """Gradients of several backward passes add up before an exchange and a step.

    Args:
        passes: how many; as ``backward_passes_per_step``.

    Raises:
        ValueError: it is not a whole number above 0.
    """

    passes: int

    def __post_init__(self) -> None:
        check_count("passes", self.passes)

    def __repr__(self) -> str:
        return f"Schedule.Accumulate({self.passes})"
