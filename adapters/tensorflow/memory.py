"""What compressions remember of variables, for as long as these live."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import gradients, runtime
from hvdlite.exchange import StrategyState
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp

# By the variables' identities, which are theirs until the first of them is gone.
_states: dict[tuple[int, ...], StrategyState] = {}


def state_of(sources: Sequence[Any]) -> StrategyState:
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
    key = tuple(map(id, sources))
    if key not in _states:
        _states[key] = StrategyState()
        if sources:
            weakref.finalize(sources[0], _states.pop, key, None)
    return _states[key]


def compression_state_dict(
    variables: Sequence[Any], process_set: ProcessSet = global_process_set
) -> dict[str, Any]:
    """Return what the compression of a `DistributedGradientTape` remembers, on this rank.

    Args:
        variables: what ``gradient`` was called with, in that order.
        process_set: the ranks that take part.

    Returns:
        Numbers and arrays, to be saved beside the variables; {}: it remembers nothing.
    """
    return gradients.save(state_of(tf.nest.flatten(variables)), process_set)


def load_compression_state_dict(
    variables: Sequence[Any],
    state_dict: Mapping[str, Any],
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Take over what `compression_state_dict` has returned, as far as it is this rank's.

    Args:
        variables: as there.
        state_dict: what it has returned.
        op: of the tape.
        process_set: the ranks that take part.
    """
    state = state_of(tf.nest.flatten(variables))
    gradients.load(state, state_dict, ReduceOp(op), process_set)


def consolidate_compression_state(
    variables: Sequence[Any], process_set: ProcessSet = global_process_set
) -> None:
    """Make what the compression remembers the same on all ranks; collective.

    To be called before one rank saves `compression_state_dict` for all. Nothing is lost: every
    rank gets the average of what all have left to send.

    Args:
        variables: as there.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: communication failed.
    """
    name = runtime.engine(process_set).unnamed("consolidate_compression_state")
    gradients.consolidate(state_of(tf.nest.flatten(variables)), name, process_set)
