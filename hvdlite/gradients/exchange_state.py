"""The state of a compression and of a schedule, saved and loaded together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import StrategyState
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, is_outside
from hvdlite.gradients import strategy_state

_NO_STEPS: Mapping[str, Any] = {"steps": 0, "outer": {}, "compression": {}}


class ExchangeState:
    """The state that an exchange of gradients or weights keeps from step to step.

    Args:
        state: of the compression of gradients.

    Attributes:
        steps: the local steps of a schedule; None: no step has been made yet.
    """

    def __init__(self, state: StrategyState) -> None:
        self.state = state
        self.steps: Any = None
        self._loaded: Mapping[str, Any] | None = None  # for steps that do not exist yet

    def follow(self, steps: Any) -> None:
        """Set the schedule's steps, and load into them the state that was loaded before."""
        self.steps = steps
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            steps.load_state_dict(loaded)

    def state_dict(self, process_set: ProcessSet) -> dict[str, Any]:
        """Return numbers and arrays under ``"compression"`` and ``"schedule"``, if any."""
        saved = {"compression": strategy_state.save(self.state, process_set)}
        if self.steps is not None:
            saved["schedule"] = self.steps.state_dict()
        elif self._loaded is not None:
            saved["schedule"] = dict(self._loaded)
        return {key: each for key, each in saved.items() if each}

    def common_state_dict(self, process_set: ProcessSet) -> dict[str, Any]:
        """Return the part of `state_dict` with which another rank may begin."""
        saved = self.state_dict(process_set)
        owners = [saved, *([saved["schedule"]] if "schedule" in saved else [])]
        for owner in owners:
            if "compression" in owner:
                owner["compression"] = strategy_state.common_part(owner["compression"])
        return saved

    def load_state_dict(
        self,
        saved: Mapping[str, Any],
        op: ReduceOp,
        process_set: ProcessSet,
        is_own: bool = False,
    ) -> None:
        """Load this rank's part of a `state_dict` for gradients that are reduced by ``op``.

        A rank outside the process set ignores it.

        Args:
            is_own: whether this process has saved it, maybe under another number. A schedule that
                has made its first step since begins without it.
        """
        if is_outside(process_set):
            return
        strategy_state.load(self.state, saved.get("compression", {}), op, process_set, is_own)
        schedule = saved.get("schedule", _NO_STEPS if is_own else None)
        if self.steps is None:
            self._loaded = saved.get("schedule", None if is_own else self._loaded)
        elif schedule is not None:
            self.steps.load_state_dict(schedule, is_own)

    def consolidate(self, process_set: ProcessSet) -> None:
        """Replace the compression's residuals by their average over the ranks; collective.

        A rank outside the process set has none, and does nothing.
        """
        if is_outside(process_set):
            return
        name = runtime.engine(process_set).unnamed("consolidate_exchange_state")
        strategy_state.consolidate(self.state, name, process_set)
        if self.steps is not None:
            self.steps.consolidate_exchange_state()
