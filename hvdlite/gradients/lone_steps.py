"""The warning about a rank that trains by itself: its weights change, and it exchanges nothing.

A script that broadcasts its weights or divides its data, and does not wrap its optimizer, trains as
many models as it has ranks. So adapters count the steps that follow.
"""

from __future__ import annotations

import logging

from hvdlite.base import observers
from hvdlite.engine import runtime
from hvdlite.observe import status
from hvdlite.world import world

_log = logging.getLogger("hvdlite")

# After so many steps, and where fewer than half of them come with an exchange: of metrics, say.
_STEPS = 50


class LoneSteps:
    """Count steps, and those of them that come without an exchange.

    A step has one if an operation has been submitted since the step before, or if a wrapped
    optimizer has counted it, which may exchange weights seldom. This is an observer until it has
    counted enough steps, and warns then, on rank 0.

    Args:
        remedy: the call that exchanges gradients.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._steps = self._shared = self._counted = 0
        self._submits = False  # since the last step
        observers.add(self)

    def __call__(self, point: str, *_: object) -> None:
        """Observe that an operation is submitted."""
        self._submits = self._submits or point == "submit"

    def count(self, what: str) -> bool:
        """Count a step; return whether there are more to count.

        Args:
            what: what makes the steps, for the message.
        """
        before, self._counted = self._counted, status.counts.total()
        self._steps += 1
        self._shared += self._submits or self._counted > before
        self._submits = False
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
