"""TensorFlow's and Keras' variables: names, descriptions, and values that are kept for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite.compression import Parameter
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.gradients.keras_replica import OptimizerReplica, unique
from hvdlite.gradients.replicas import DEVICE_STRIDE, ReplicaCheck, weight_label
from hvdlite.tensorflow.graphs import for_session
from hvdlite.tensorflow.tensors import dtype_of, to_array, value_of

_REMEDY = (
    "hvd.broadcast_variables(model.variables, root_rank=0), and the same with "
    "optimizer.variables (in Keras, model.fit(..., "
    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]) does both)"
)

_Value = TypeVar("_Value")
#: Weights as a graph has given them; empty between exchanges, as updates need the memory.
Given = list[Any]


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


@dataclass(eq=False)
class ReplicaChecks:
    """The comparisons across ranks of the variables that an optimizer, or tapes, train.

    Attributes:
        replica: What is compared of the optimizer.
    """

    replica: OptimizerReplica = field(default_factory=OptimizerReplica)
    _checks: WeakVariablesDict[tuple[ReplicaCheck, Given | None]] = field(
        default_factory=WeakVariablesDict, init=False
    )

    def of(
        self, sources: Sequence[Any], process_set: ProcessSet, label: str = ""
    ) -> tuple[ReplicaCheck | None, Given | None]:
        """Return the comparison of some variables; None: there is nothing to compare.

        With it comes a list of the weights, which a graph for a session gives to each exchange,
        since no function reads them; None: it is another graph.
        Exchanges of different labels may overlap in a graph for a session, in an order of its own
        on each rank, so there each label has a comparison and a count of steps of its own.
        """
        inner = [value_of(source) for source in sources]
        variables = [variable for variable in inner if isinstance(variable, tf.Variable)]
        if not variables:
            return None, None
        stride = DEVICE_STRIDE if any(map(_is_on_gpu, variables)) else 1
        replica = self.replica

        def make() -> tuple[ReplicaCheck, Given | None]:
            named = [(name, weakref.ref(source)) for name, source in named_variables(sources)]
            given: Given | None = [] if for_session() else None

            def values() -> list[tuple[str, Callable[[], Any]]]:
                labels = [weight_label(name) for name, _ in named]
                if given is not None:
                    return [(label, partial(_nth, given, n)) for n, label in enumerate(labels)]
                living = [(name, own) for name, source in named if (own := source()) is not None]
                weights = [(weight_label(name), source) for name, source in living]
                both = *weights, *replica.state(living)
                return [(label, partial(_find, weakref.ref(value_of(v)))) for label, v in both]

            check = ReplicaCheck(
                replica.options,
                values,
                _REMEDY,
                lambda: replica.uncompared,
                stride=lambda: stride,
            )
            return check, given

        own = [label] if for_session() else []
        return self._checks.of(variables, make, id(process_set), *own)


def named_variables(sources: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the variables among some sources, with their unique names."""
    pairs = zip(unique_names(sources), sources, strict=True)
    return [pair for pair in pairs if isinstance(value_of(pair[1]), tf.Variable)]


def _nth(given: Given, number: int) -> Any:
    return np.asarray(given[number]) if given else None


def _is_on_gpu(variable: tf.Variable) -> bool:
    return "GPU" in str(variable.device)


def _find(reference: Callable[[], tf.Variable | None]) -> Any:
    """View a variable's value, or what can be sliced into one; None: it is gone.

    Also called by the Python function of a graph, where eager mode is on.
    """
    variable = reference()
    if variable is None:
        return None
    return _Rows(variable) if _is_on_gpu(variable) else to_array(read(variable))


class _Rows:
    """A variable on an accelerator, of which single rows are copied to the host."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        self.shape = tuple(variable.shape)
        self.dtype = dtype_of(variable.dtype)
        self.itemsize = self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Any:
        return to_array(read(self._variable)[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return to_array(read(self._variable))


def read(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable unseen by tapes and functions."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
