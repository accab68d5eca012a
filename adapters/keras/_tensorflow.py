"""TensorFlow below Keras: gradients and local steps, eagerly and in ``tf.function``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdlite.gradients.keras_exchange import LABEL, Synchronizer
from hvdlite.tensorflow.gradients import Gradient, GradientAllreduce
from hvdlite.tensorflow.recipe import pin_device
from hvdlite.tensorflow.tensors import CONVERSION, unconverted, value_of
from hvdlite.tensorflow.variables import ReplicaChecks, read

__all__ = ["CONVERSION", "after", "as_dense", "connect", "is_traced", "pin_device", "unconverted"]


def connect(synchronizer: Synchronizer) -> GradientAllreduce:
    """Return the exchange of an optimizer's gradients."""
    synchronizer.replica.read = _number
    return GradientAllreduce(
        synchronizer.options,
        LABEL,
        ReplicaChecks(synchronizer.replica),
        synchronizer.state.state,
        synchronizer.leaves_out,
    )


def _number(variable: Any) -> Any:
    """Return the number that a variable has; None: it is in a session's graph."""
    inner = value_of(variable)
    return None if tf.is_symbolic_tensor(inner.handle) else read(inner).numpy().item()


def after(gradients: Sequence[Gradient]) -> AbstractContextManager[None]:
    """Make operations of a graph wait for the exchange, which also compares variables.

    An update that uses no gradient, like the count of steps, could come too early.
    """
    if tf.executing_eagerly():
        return nullcontext()
    parts = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    # Those of local variables have not been exchanged, so all are waited for.
    exchanged = tf.group(*(each for each in parts if each is not None))
    waits: AbstractContextManager[None] = tf.control_dependencies([exchanged])
    return waits


def is_traced() -> bool:
    """Return whether the caller is being traced into a graph."""
    return not tf.executing_eagerly()


def as_dense(gradient: Any) -> tf.Tensor:
    """Return a gradient as a tensor with the shape of its variable."""
    return tf.convert_to_tensor(gradient)
