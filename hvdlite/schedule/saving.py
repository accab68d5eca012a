"""What a compression and a schedule remember, together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite import gradients, runtime
from hvdlite.compression import StrategyState
from hvdlite.process_sets import ProcessSet, is_outside
from hvdlite.reduction import ReduceOp
from hvdlite.schedule.local_steps import LocalSteps


class ExchangeState:
    """What is remembered from step to step by an exchange of gradients, or of weights.

    Args:
        state: what the compression of gradients remembers.

    Attributes:
        state: as given.
        steps: those of a schedule; None: there has been none.
    """

    def __init__(self, state: StrategyState) -> None:
        self.state = state
        self.steps: LocalSteps | None = None
        self._loaded: Mapping[str, Any] | None = None  # of steps that there are not yet

    def follow(self, steps: LocalSteps) -> None:
        """Take note of a schedule's steps, which go on from those that were loaded before."""
        self.steps = steps
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            steps.load_state_dict(loaded)

    def state_dict(self, process_set: ProcessSet) -> dict[str, Any]:
        """Return numbers and arrays, by ``"compression"`` and ``"schedule"``; {}: nothing."""
        saved = {"compression": gradients.save(self.state, process_set)}
        if self.steps is not None:
            saved["schedule"] = self.steps.state_dict()
        elif self._loaded is not None:
            saved["schedule"] = dict(self._loaded)
        return {key: each for key, each in saved.items() if each}

    def load_state_dict(
        self, saved: Mapping[str, Any], op: ReduceOp, process_set: ProcessSet
    ) -> None:
        """Take over what `state_dict` has returned, as far as it is this rank's; of this ``op``.

        A rank outside the process set has no use for it.
        """
        if is_outside(process_set):
            return
        gradients.load(self.state, saved.get("compression", {}), op, process_set)
        if "schedule" not in saved:
            return
        if self.steps is None:
            self._loaded = saved["schedule"]
        else:
            self.steps.load_state_dict(saved["schedule"])

    def consolidate(self, process_set: ProcessSet) -> None:
        """Let all ranks remember the average of what the compression has left; collective.

        A rank outside the process set has nothing left, and does nothing.

        Raises:
            HorovodInternalError: communication failed.
        """
        if is_outside(process_set):
            return
        name = runtime.engine(process_set).unnamed("consolidate_exchange_state")
        gradients.consolidate(self.state, name, process_set)
        if self.steps is not None:
            self.steps.consolidate_exchange_state()
