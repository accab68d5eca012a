"""Values that are kept for variables, for as long as these live."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvdlite.compression import StrategyState
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.schedule import ExchangeState
from hvdlite.tensorflow.tensors import value_of

_Value = TypeVar("_Value")


class ByVariables(dict[tuple[Any, ...], _Value]):
    """Something for each list of variables, by their identities among other things.

    These are theirs until the first of the variables is gone: then it is forgotten.
    """

    def keep(self, key: tuple[Any, ...], value: _Value, variables: Sequence[Any]) -> None:
        """Add a value, which is to be forgotten with the first of the variables."""
        self[key] = value
        itself = weakref.ref(self)  # what belongs to one optimizer goes with that
        for variable in variables:
            weakref.finalize(variable, _forget, itself, key)


def _forget(reference: weakref.ref[ByVariables[Any]], key: tuple[Any, ...]) -> None:
    values = reference()
    if values is not None:
        values.pop(key, None)


_states: ByVariables[ExchangeState] = ByVariables()


def state_of(sources: Sequence[Any]) -> ExchangeState:
    """What is remembered of a list of variables, of TensorFlow or Keras, in this order.

    Raises:
        ValueError: there is something else among them, which does not last from step to step.
    """
    for source in sources:
        if not isinstance(source, tf.Variable) and not hasattr(source, "assign"):
            raise ValueError(
                "this compression remembers something of each source from step to step, so "
                f"sources have to be variables; there is a {type(source).__name__} among them"
            )
    inner = [value_of(source) for source in sources]
    key = tuple(map(id, inner))
    if key not in _states:
        _states.keep(key, ExchangeState(StrategyState()), inner)
    return _states[key]


def exchange_state_dict(
    variables: Sequence[Any], process_set: ProcessSet = global_process_set
) -> dict[str, Any]:
    """Return what a `DistributedGradientTape`'s compression and schedule remember on this rank.

    Args:
        variables: what ``gradient`` was called with, in that order, without local sources.
        process_set: the ranks that take part.

    Returns:
        Numbers and arrays, to be saved beside the variables; {}: nothing.
    """
    return state_of(tf.nest.flatten(variables)).state_dict(process_set)


def load_exchange_state_dict(
    variables: Sequence[Any],
    state_dict: Mapping[str, Any],
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Take over what `exchange_state_dict` has returned, as far as it is this rank's.

    Args:
        variables: as there.
        state_dict: what it has returned.
        op: of the tape.
        process_set: the ranks that take part.
    """
    state = state_of(tf.nest.flatten(variables))
    state.load_state_dict(state_dict, ReduceOp(op), process_set)


def consolidate_exchange_state(
    variables: Sequence[Any], process_set: ProcessSet = global_process_set
) -> None:
    """Make what the compression remembers the same on all ranks; collective.

    To be called before one rank saves `exchange_state_dict` for all. Nothing is lost: every
    rank gets the average of what all have left to send.

    Args:
        variables: as there.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: communication failed.
    """
    state_of(tf.nest.flatten(variables)).consolidate(process_set)
