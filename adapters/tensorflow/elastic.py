"""Elastic training with TensorFlow: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdlite.base.reduction import Average
from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.elastic.state import ExchangeHandler, VariablesHandler
from hvdlite.engine.process_sets import global_process_set
from hvdlite.keras._elastic import KerasState as TensorFlowKerasState
from hvdlite.tensorflow.exchange_state import exchange_state, exchange_states

__all__ = ["HostUpdate", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(ObjectState):
    """The elastic state of variables and of other attributes.

    With the variables goes what the compression and the schedule of a `DistributedGradientTape`
    remember of its sources, if all of them are among the variables. Residuals stay each rank's own:
    one that joins begins with none.

    Args:
        variables: ``tf.Variable`` or Keras variables, in any nested structure; the attribute
            ``variables``.
        session: Of TensorFlow 1; not supported.
        **kwargs: The other attributes, and their initial values.

    Raises:
        ValueError: There are no variables, a session is given, or the class has an attribute or
            a method of such a name.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError(
                "sessions belong to TensorFlow 1; run eagerly or in tf.function, without a session"
            )
        if variables is None:
            raise ValueError(
                "TensorFlow 2 keeps no list of all variables; pass those that training changes, "
                "for example variables=[*model.variables, *optimizer.variables]"
            )
        super().__init__(variables=VariablesHandler(variables, tf.nest.flatten), **kwargs)
        self._handlers.append(("variables", ExchangeHandler(variables, _of_tapes)))


def _of_tapes(variables: Any, keys: Iterable[tuple[int, ...]]) -> dict[Any, Any]:
    """Return what tapes remember of variables, by the positions of their sources."""
    flat = tf.nest.flatten(variables)
    for key in keys:
        exchange_state([flat[position] for position in key])
    states = exchange_states(flat).items()
    return {key: (state, Average, global_process_set) for key, state in states}
