"""The state of compressions and schedules of tapes: residuals, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.compression import StrategyState
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.exchange_state import ExchangeState
from hvdlite.tensorflow.tensors import value_of
from hvdlite.tensorflow.variables import WeakVariablesDict

__all__ = ["exchange_state_dict", "load_exchange_state_dict", "consolidate_exchange_state"]

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


def exchange_states(variables: Sequence[Any]) -> dict[tuple[int, ...], ExchangeState]:
    """Return the states whose sources are among some variables, by the sources' positions."""
    positions = {id(value_of(each)): n for n, each in enumerate(variables)}
    return {
        tuple(positions[source] for source in key): state
        for key, state in _states.items()
        if positions.keys() >= set(key)
    }


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
        variables, process_set: As for `exchange_state_dict`.
        state_dict: The result.
        op: The tape's.
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
        variables, process_set: As for `exchange_state_dict`.

    Raises:
        HorovodInternalError: Communication failed.
    """
    exchange_state(tf.nest.flatten(variables)).consolidate(process_set)
