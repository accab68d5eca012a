"""TensorFlow's and Keras' variables: names, descriptions, and values that are kept for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from hvdlite.compression import Parameter
from hvdlite.gradients import ReplicaCheck, weight_label
from hvdlite.keras._synchronizer import unique
from hvdlite.process_sets import ProcessSet
from hvdlite.tensorflow.tensors import dtype_of, to_array, value_of

_REMEDY = (
    "hvd.broadcast_variables(model.variables, root_rank=0), and the same with "
    "optimizer.variables (in Keras, model.fit(..., "
    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]) does both)"
)

_Value = TypeVar("_Value")


def is_variable(value: Any) -> bool:
    """Return whether a value is a variable of TensorFlow or Keras."""
    return hasattr(value, "assign") and hasattr(value, "dtype")


def name_of(variable: Any, number: int) -> str:
    """Return the path of a Keras variable, the name of a ``tf.Variable``, or a tensor's number."""
    path = getattr(variable, "path", None)
    if isinstance(path, str):
        return path
    if isinstance(variable, tf.Variable):
        return str(variable.name).removesuffix(":0")
    return f"tensor {number}"


def unique_names(variables: Sequence[Any]) -> list[str]:
    """Return the variables' names; repeated ones are numbered."""
    return unique(name_of(variable, number) for number, variable in enumerate(variables))


def parameters_of(variables: Sequence[Any]) -> tuple[Parameter, ...]:
    """Describe variables of TensorFlow or Keras, or tensors."""
    return tuple(
        Parameter(name, _shape(name, variable), dtype_of(variable.dtype))
        for name, variable in zip(unique_names(variables), variables, strict=True)
    )


def _shape(name: str, variable: Any) -> tuple[int, ...]:
    shape = tf.TensorShape(variable.shape)
    if not shape.is_fully_defined():
        if not tf.executing_eagerly():
            raise ValueError(
                f"{name!r} has the static shape {shape} inside tf.function, and buckets need to "
                "know all of it; give it one with tf.ensure_shape, or call gradient() eagerly"
            )
        shape = tf.convert_to_tensor(variable).shape
    return tuple(shape.as_list())


class WeakVariablesDict(dict[tuple[Any, ...], _Value]):
    """Values for lists of variables, each of which is dropped with the first of its variables."""

    def of(self, variables: Sequence[Any], make: Callable[[], _Value], *more: Any) -> _Value:
        """Return the value for these variables, and more, which is made if there is none."""
        key = (*map(id, variables), *more)
        if key not in self:
            self[key] = make()
            itself = weakref.ref(self)  # what belongs to one optimizer goes with that
            for variable in variables:
                weakref.finalize(variable, _drop, itself, key)
        return self[key]


def _drop(reference: weakref.ref[WeakVariablesDict[Any]], key: tuple[Any, ...]) -> None:
    values = reference()
    if values is not None:
        values.pop(key, None)


class ReplicaChecks:
    """The comparisons across ranks of the variables that an optimizer, or tapes, train."""

    def __init__(
        self,
        describe_optimizer: Callable[[], list[tuple[str, Any]]] = list,
        uncompared: Callable[[], int] = lambda: 1,
    ) -> None:
        self._describe_optimizer = describe_optimizer
        self._uncompared = uncompared
        self._checks: WeakVariablesDict[ReplicaCheck] = WeakVariablesDict()

    def of(self, sources: Sequence[Any], process_set: ProcessSet) -> ReplicaCheck | None:
        """Return the comparison of some variables; None: there is nothing to compare."""
        inner = [value_of(source) for source in sources]
        variables = [variable for variable in inner if isinstance(variable, tf.Variable)]
        # In a graph for a session, no function could read them.
        if not variables or not tf.compat.v1.executing_eagerly_outside_functions():
            return None

        def make() -> ReplicaCheck:
            return ReplicaCheck(
                self._describe_optimizer, _values(sources, inner), _REMEDY, self._uncompared
            )

        return self._checks.of(variables, make, id(process_set))


def _values(
    sources: Sequence[Any], inner: Sequence[Any]
) -> Callable[[], list[tuple[str, Callable[[], Any]]]]:
    """Return a function that returns the labels of variables, and what reads each."""
    named = [
        (weight_label(name), partial(_read, weakref.ref(variable)))
        for name, variable in zip(unique_names(sources), inner, strict=True)
        if isinstance(variable, tf.Variable)
    ]
    return lambda: [*named]


def _read(reference: Callable[[], tf.Variable | None]) -> Any:
    """View the value of a variable, if it is still there, unseen by tapes and functions.

    Also called by the Python function of a graph, where eager mode is on.
    """
    variable = reference()
    if variable is None:
        return None
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return to_array(value)
