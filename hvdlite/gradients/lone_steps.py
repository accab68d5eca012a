"""The warning about a rank that trains by itself: its weights change, and it exchanges nothing.

A script that broadcasts its weights or divides its data, and does not wrap its optimizer, trains as
many models as it has ranks. So adapters count the steps that follow.
"""

from __future__ import annotations

import logging
from typing import Any

from hvdlite.base import observers
from hvdlite.engine import runtime
from hvdlite.world import world

_log = logging.getLogger("hvdlite")

# Who makes so many steps trains alone if fewer than half of them come with an exchange. A metric is
# none: it has fewer bytes than this part of the weights.
_STEPS, _PART = 50, 1 / 1000
# The operations and graphs after which to look no longer.
_MOST = 10_000


class LoneSteps:
    """Count the steps of an optimizer that is not wrapped, and what this rank exchanges by name.

    It is an observer until it has counted enough.

    Args:
        nbytes: the size of the weights, if it is known.

    Attributes:
        is_over: whether there is no more to count.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.is_over = False
        self._least = _PART * nbytes
        self._steps = self._lone = self._looks = 0
        self._submitted = 0  # bytes, since the last step
        observers.add(self)

    def __call__(self, point: str, *about: Any) -> None:
        """Observe that operations are submitted."""
        if point == "submit":
            lane, operations = about
            if lane.startswith("named"):  # those of wrapped optimizers are not this one's
                self._submitted += sum(each.nbytes for each in operations)
            self._look()

    def count(self, is_step: bool = True) -> bool:
        """Count a step, unless it is none; return whether most had no exchange, after the last."""
        if self.is_over:
            return False
        self._look()
        if is_step:
            self._steps += 1
            self._lone += self._submitted <= self._least
            self._submitted = 0
        if self._steps < _STEPS:
            return False
        self.end()
        return 2 * self._lone > _STEPS

    def _look(self) -> None:
        self._looks += 1
        if self._looks > _MOST:
            self.end()

    def warn(self, what: str, remedy: str) -> None:
        """Warn on rank 0, unless nothing is to be compared, and tell how to exchange gradients."""
        is_due = world.is_initialized() and world.rank() == 0
        if is_due and runtime.engine().settings.check_ranks != "off":
            _log.warning(
                "each rank trains by itself: before %d of the %d steps of %s nothing was "
                "exchanged; call %s (where ranks exchange by other means than hvdlite, or seldom, "
                "HVDLITE_CHECK_RANKS=off leaves this out)",
                self._lone,
                self._steps,
                what,
                remedy,
            )

    def end(self) -> None:
        """Count and observe no longer."""
        self.is_over = True
        observers.remove(self)
