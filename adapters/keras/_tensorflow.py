"""TensorFlow below Keras: gradients and local steps, eagerly and in ``tf.function``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdlite.compression import Parameter
from hvdlite.gradients.keras_exchange import LABEL, Synchronizer
from hvdlite.tensorflow.device import pin_device
from hvdlite.tensorflow.gradients import Gradient, GradientAllreduce
from hvdlite.tensorflow.tensors import CONVERSION, unconverted, value_of
from hvdlite.tensorflow.variables import ReplicaChecks, parameters_of, read

__all__ = ["CONVERSION", "Backend", "after", "as_dense", "unconverted", "is_traced", "pin_device"]


class Backend:
    """The exchange of TensorFlow's gradients and variables.

    Attributes:
        checks: The comparisons of variables across ranks.
    """

    owner = "keras.tensorflow"

    def __init__(self, synchronizer: Synchronizer) -> None:
        options = synchronizer.options
        synchronizer.replica.read = lambda each: read(value_of(each)).numpy().item()
        self.checks = ReplicaChecks(synchronizer.replica, synchronizer.uncompared)
        allreduce = GradientAllreduce(
            options.strategy,
            options.reduction,
            options.sparse_as_dense,
            options.process_set,
            LABEL,
            synchronizer.state.state,
            self.checks if options.replicates else None,
            synchronizer.leaves_out,
        )
        self.reduce = unconverted(allreduce.reduce)
        self.divide_by_size = allreduce.divide_by_size

    def are_finite(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """Return whether all dense gradients are finite, a bool tensor."""
        dense = [g for g in gradients if isinstance(g, tf.Tensor) and g.dtype.is_floating]
        return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(each)) for each in dense)])

    def describe(self, variables: Sequence[Any]) -> list[Parameter]:
        """Return names, shapes and dtypes of variables."""
        return list(parameters_of(variables))


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
