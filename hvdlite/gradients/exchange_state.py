"""The state of strategies in checkpoints, and of schedules with it.

Residuals differ from rank to rank. A checkpoint that only rank 0 writes has rank 0's, which must
not be loaded on all ranks: they would count as many times as there are ranks. `consolidate` gives
all ranks the average, which preserves the sum; then any rank's state is right for all, whatever the
number of ranks that load it.

Other arrays are the same on all ranks, such as low-rank factors and the number of exchanges. A rank
that comes in later begins with those of another rank (`common_part`), and without residuals.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.base.reduction import Average, ReduceOp, is_floating
from hvdlite.compression import StrategyState
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, is_outside
from hvdlite.errors import NotInitializedError

_COMMON = -1
_NO_STEPS: Mapping[str, Any] = {"steps": 0, "outer": {}, "compression": {}}


def save(state: StrategyState, process_set: ProcessSet) -> dict[str, Any]:
    """Return the state and its owner; {} if there is none. It works after ``shutdown()``, too.

    Returns:
        ``rank`` (-1: the state is right for all ranks), ``size``, ``common``: the names of arrays
        that are the same on all ranks in any case, and ``parameters``: arrays by the name of the
        parameter and of the array.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()`` if nothing has been
            exchanged since it was loaded.
    """
    if not state:
        return {}
    try:
        engine = runtime.engine(process_set)
        rank, size = engine.rank, engine.size
    except NotInitializedError:
        if state.owner is None:
            raise
        rank, size = state.owner
    rank = _COMMON if state.is_common or size == 1 else rank
    return {
        "rank": rank,
        "size": size,
        "common": sorted(state.common),
        "parameters": state.state_dict(),
    }


def common_part(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a result of `save` that is right for a rank without a state."""
    if not saved or int(saved["rank"]) == _COMMON:
        return dict(saved)
    parameters = {
        name: {key: array for key, array in entry.items() if key in saved["common"]}
        for name, entry in saved["parameters"].items()
    }
    return {**saved, "parameters": parameters}


def load(
    state: StrategyState,
    saved: Mapping[str, Any],
    op: ReduceOp,
    process_set: ProcessSet,
    is_own: bool = False,
) -> None:
    """Load what `save` has returned on this rank, or on any rank after `consolidate`.

    Of the state of another rank, a rank without any takes the common part; otherwise it keeps its
    own.

    Args:
        saved: {}: there was no state.
        is_own: whether this process has saved it, maybe under another number.
    """
    if not saved:
        state.load_state_dict({})
        return
    state.common.update(saved.get("common", ()))
    engine = runtime.engine(process_set)
    rank, size = int(saved["rank"]), int(saved["size"])
    if rank == _COMMON:
        # The sum over all ranks stays the same, also where their number does not.
        factor = 1.0 if op is Average else size / engine.size
        state.load_state_dict(_scaled(saved["parameters"], factor))
        state.is_common = True
    elif is_own or (rank, size) == (engine.rank, engine.size):
        state.load_state_dict(saved["parameters"])
    elif not state:
        common = common_part({"common": (), **saved})["parameters"]
        state.load_state_dict({name: entry for name, entry in common.items() if entry})
        if not any(saved["parameters"][name].keys() - entry for name, entry in common.items()):
            return
        warnings.warn(
            f"rank {engine.rank} of {engine.size}: what the compression has left to send was saved "
            f"on rank {rank} of {size} for that rank alone, and is lost on this one; before "
            "saving, call consolidate_exchange_state() on all ranks",
            stacklevel=4,
        )


def _scaled(parameters: Mapping[str, Mapping[str, Any]], factor: float) -> Any:
    if factor == 1.0:
        return parameters
    return {
        name: {
            key: np.asarray(array) * factor if is_floating(np.asarray(array).dtype) else array
            for key, array in entry.items()
        }
        for name, entry in parameters.items()
    }


def consolidate(state: StrategyState, name: str, process_set: ProcessSet) -> None:
    """Give every rank the average of all ranks' states; collective."""
    own = state.state_dict()
    described = [
        (parameter, key, array.shape, array.dtype.str)
        for parameter, entry in own.items()
        for key, array in entry.items()
    ]
    everywhere = collectives.allgather_object(
        described, f"{name}: its keys", process_set=process_set
    )
    merged: dict[str, dict[str, Any]] = {}
    for parameter, key, shape, dtype in sorted({each for many in everywhere for each in many}):
        array = own.get(parameter, {}).get(key, np.zeros(shape, dtype))
        op = Average if is_floating(array.dtype) else ReduceOp.MAX  # of numbers of exchanges
        label = f"{name}: {key} of {parameter!r}"
        merged.setdefault(parameter, {})[key] = collectives.allreduce(
            array, name=label, op=op, process_set=process_set
        )
    state.load_state_dict(merged)
    state.is_common = True


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
        saved = {"compression": save(self.state, process_set)}
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
                owner["compression"] = common_part(owner["compression"])
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
        load(self.state, saved.get("compression", {}), op, process_set, is_own)
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
        consolidate(self.state, name, process_set)
        if self.steps is not None:
            self.steps.consolidate_exchange_state()
