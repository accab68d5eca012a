"""The warning about a rank that trains by itself: its weights change, and it exchanges nothing.

A script that broadcasts its weights or divides its data, and does not wrap its optimizer, trains as
many models as it has ranks. So adapters count the steps that follow.
"""

from __future__ import annotations

import logging
from typing import Any

from hvdlite.base import observers
from hvdlite.engine import runtime
from hvdlite.observe import status
from hvdlite.world import world

_log = logging.getLogger("hvdlite")

# A warning comes after so many steps, if fewer than half of them come with an exchange. A metric is
# no exchange: it has fewer bytes than this part of the weights.
_STEPS, _PART = 50, 1 / 1000


class LoneSteps:
    """Count steps, and those of them that come without an exchange.

    A step has one if operations have been submitted since the step before, or if a wrapped
    optimizer has counted it, which may exchange weights seldom. This is an observer until it has
    counted enough steps, and warns then, on rank 0.

    Args:
        remedy: the call that exchanges gradients.
        nbytes: the size of the weights, if it is known.
    """

    def __init__(self, remedy: str, nbytes: int = 0) -> None:
        self._remedy, self._least = remedy, _PART * nbytes
        self._steps = self._shared = self._counted = 0
        self._submitted = 0  # bytes, since the last step
        observers.add(self)

    def __call__(self, point: str, *about: Any) -> None:
        """Observe that operations are submitted."""
        if point == "submit":
            self._submitted += sum(each.nbytes for each in about[1])

    def count(self, what: str) -> bool:
        """Count a step; return whether there are more to count.

        Args:
            what: what makes the steps, for the message.
        """
        before, self._counted = self._counted, status.counts.total()
        self._steps += 1
        self._shared += self._submitted > self._least or self._counted > before
        self._submitted = 0
        if self._steps != _STEPS:
            return self._steps < _STEPS
        self.end()
        is_due = 2 * self._shared < _STEPS and world.is_initialized() and world.rank() == 0
        if is_due and runtime.engine().settings.check_ranks != "off":
            _log.warning(
                "each rank trains by itself: before %d of the %d steps of %s nothing was "
                "exchanged; %s (where ranks exchange by other means than hvdlite, or seldom, "
                "HVDLITE_CHECK_RANKS=off leaves this out)",
                _STEPS - self._shared,
                _STEPS,
                what,
                self._remedy,
            )
        return False

    def end(self) -> None:
        """Observe no longer."""
        observers.remove(self)
