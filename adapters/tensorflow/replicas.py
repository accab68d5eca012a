"""The comparison of TensorFlow's variables across ranks, for as long as these live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.gradients import ReplicaCheck, describe_weights
from hvdlite.process_sets import ProcessSet
from hvdlite.tensorflow.memory import ByVariables
from hvdlite.tensorflow.names import unique_names
from hvdlite.tensorflow.tensors import to_array, value_of

_REMEDY = (
    "hvd.broadcast_variables(model.variables, root_rank=0), and the same with "
    "optimizer.variables (in Keras, model.fit(..., "
    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]) does both)"
)


class Replicas:
    """The comparisons of the variables that an optimizer, or tapes, have gradients of.

    Args:
        describe_optimizer: returns what is compared beside the variables.
    """

    def __init__(self, describe_optimizer: Callable[[], list[tuple[str, Any]]] = list) -> None:
        self._describe_optimizer = describe_optimizer
        self._checks: ByVariables[ReplicaCheck] = ByVariables()

    def check_of(self, sources: Sequence[Any], process_set: ProcessSet) -> ReplicaCheck | None:
        """Return what compares these variables across ranks; None: nothing does.

        Args:
            sources: of TensorFlow or Keras; those that are no variables are left out.
            process_set: the ranks that take part.
        """
        inner = [value_of(source) for source in sources]
        variables = [variable for variable in inner if isinstance(variable, tf.Variable)]
        # In a graph for a session, no function could read them.
        if not variables or not tf.compat.v1.executing_eagerly_outside_functions():
            return None
        key = (id(process_set), *map(id, variables))
        if key not in self._checks:
            check = ReplicaCheck(self._describer(sources, inner), _REMEDY)
            self._checks.keep(key, check, variables)
        return self._checks[key]

    def _describer(
        self, sources: Sequence[Any], inner: Sequence[Any]
    ) -> Callable[[], list[tuple[str, Any]]]:
        named = [
            (name, weakref.ref(variable))
            for name, variable in zip(unique_names(sources), inner, strict=True)
            if isinstance(variable, tf.Variable)
        ]

        def describe() -> list[tuple[str, Any]]:
            # Also called by the Python function of a graph, where eager mode is on.
            living = ((name, variable()) for name, variable in named)
            weights = ((name, _read(each)) for name, each in living if each is not None)
            return [*self._describe_optimizer(), *describe_weights(weights)]

        return describe


def _read(variable: tf.Variable) -> Any:
    """View the value of a variable, without any tape's or function's taking note of it."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return to_array(value)
