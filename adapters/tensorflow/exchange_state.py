"""The state of compressions and schedules of tapes: residuals, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import collectives
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.compression import StrategyState
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.exchange_state import ExchangeState
from hvdlite.tensorflow.tensors import value_of
from hvdlite.tensorflow.variables import WeakVariablesDict
from hvdlite.world import world

_states: WeakVariablesDict[ExchangeState] = WeakVariablesDict()


def exchange_state(sources: Sequence[Any]) -> ExchangeState:
    """Return the state for a list of variables, of TensorFlow or Keras, in this order."""
    for source in sources:
        if not isinstance(source, tf.Variable) and not hasattr(source, "assign"):
            raise ValueError(
                "this compression remembers something of each source from step to step, so "
                f"sources have to be variables; there is a {type(source).__name__} among them"
            )
    inner = [value_of(source) for source in sources]
    return _states.of(inner, lambda: ExchangeState(StrategyState()))


class ExchangeStates:
    """The states of the tapes whose sources are among some variables, for `TensorFlowState`.

    Args:
        variables: Of TensorFlow or Keras.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._kept: dict[tuple[int, ...], dict[str, Any]] = {}

    def save(self) -> None:
        """Keep copies of the states."""
        self._kept = self.dump()

    def restore(self) -> None:
        """Load what `save` has kept, and what there was none of begins anew."""
        for key, state in self._states():
            saved = self._kept.get(key, {})
            state.load_state_dict(saved, Average, global_process_set, is_own=True)

    def consolidate(self) -> None:
        """Make the states the same on all ranks; collective."""
        for _, state in self._states():
            state.consolidate(global_process_set)

    def dump(self) -> dict[tuple[int, ...], dict[str, Any]]:
        """Return the states by the positions of their sources."""
        return {key: state.state_dict(global_process_set) for key, state in self._states()}

    def load(self, dump: Mapping[tuple[int, ...], Mapping[str, Any]]) -> None:
        """Load what `dump` has returned, also in another process."""
        for key, saved in dump.items():
            state = exchange_state([self._variables[position] for position in key])
            state.load_state_dict(saved, Average, global_process_set)

    def sync(self) -> None:
        """Give all ranks rank 0's states, except residuals; collective."""
        own = {key: state.common_state_dict(global_process_set) for key, state in self._states()}
        common = collectives.broadcast_object(own, 0, "elastic.exchange_states")
        if world.rank() != 0:
            self.load(common)

    def _states(self) -> list[tuple[tuple[int, ...], ExchangeState]]:
        """Return the states, each with the positions of its sources."""
        positions = {id(value_of(each)): n for n, each in enumerate(self._variables)}
        return [
            (tuple(positions[source] for source in key), state)
            for key, state in _states.items()
            if positions.keys() >= set(key)
        ]


def exchange_state_dict(
    variables: Sequence[Any], process_set: ProcessSet = global_process_set
) -> dict[str, Any]:
    """Return the state of a `DistributedGradientTape`'s compression and schedule on this rank.

    Args:
        variables: The sources of ``gradient``, in that order, without local sources.
        process_set: The ranks that take part.

    Returns:
        Numbers and arrays, to be saved beside the variables; {} if there is no state.
    """
    return exchange_state(tf.nest.flatten(variables)).state_dict(process_set)


def load_exchange_state_dict(
    variables: Sequence[Any],
    state_dict: Mapping[str, Any],
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Restore a result of `exchange_state_dict`, as far as it is this rank's.

    Args:
        variables: The variables that it was saved for.
        state_dict: The result.
        op: The tape's.
        process_set: The ranks that take part.
    """
    state = exchange_state(tf.nest.flatten(variables))
    state.load_state_dict(state_dict, ReduceOp(op), process_set)


def consolidate_exchange_state(
    variables: Sequence[Any], process_set: ProcessSet = global_process_set
) -> None:
    """Make the state of the compression the same on all ranks; collective.

    Call it before one rank saves `exchange_state_dict` for all. Nothing is lost: every rank gets
    the average of what all ranks have left to send.

    Args:
        variables: The sources of ``gradient``, in that order, without local sources.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: Communication failed.
    """
    exchange_state(tf.nest.flatten(variables)).consolidate(process_set)
