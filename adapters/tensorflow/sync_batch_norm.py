"""Batch normalization over the batches of all ranks, as a layer of the Keras that is in use."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.errors import ArgumentError
from hvdlite.tensorflow.graphs import refuse_session
from hvdlite.tensorflow.moments import moments
from hvdlite.tensorflow.tensors import to_tensor

# Keras 3, or tf_keras where TF_USE_LEGACY_KERAS is set.
keras = tf.keras


@keras.utils.register_keras_serializable(package="hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """``BatchNormalization`` whose statistics in training are those of all ranks' batches.

    Forward and backward pass each take one small exchange, in which all ranks must take part;
    their batches may have different sizes, also 0, and different masks. Floats of 16 bits are
    normalized in float32. In inference it is the layer that it derives from, so a program without
    hvdlite can load a saved model, if it gives Keras a layer of this name::

        @keras.saving.register_keras_serializable(package="hvdlite")
        class SyncBatchNormalization(keras.layers.BatchNormalization):
            pass

    Args:
        axis: of the channels, one number.
        momentum: of the moving statistics, which are the same on all ranks.
        epsilon: is added to the variance.
        fused: accepted for Horovod's sake, if it is False or None.
        process_set: the ranks that take part. It is not saved.
        kwargs: all other arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: Keras runs on another backend than TensorFlow; several axes, a fused layer,
            batch renormalization or virtual batches are asked for. In training: inside a
            function that XLA compiles, or in the scope of a strategy with several replicas.
        MismatchError: when it is called in training, the ranks disagree on the channels.
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        *,
        fused: bool | None = False,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        _check_backend()
        if isinstance(axis, list | tuple):
            axis = _only(axis)
        asked = {"fused": fused, **kwargs}
        for refused in ("fused", "renorm", "virtual_batch_size", "adjustment"):
            if asked.get(refused):
                raise ArgumentError(
                    f"SyncBatchNormalization has no {refused}={asked[refused]!r}; leave it out"
                )
        super().__init__(axis=axis, momentum=momentum, epsilon=epsilon, **kwargs)
        self.supports_jit = False  # or Keras would have XLA compile the model, which cannot
        self._process_set = process_set

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalize, as ``BatchNormalization`` does."""
        if not training or not self.trainable:
            return super().call(inputs, training=False)
        refuse_session("SyncBatchNormalization in training")
        inputs = to_tensor(inputs)
        # Those that are narrower have too few digits for sums, and too small a range for squares.
        x = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        axis = _only(self.axis) % x.shape.rank
        if mask is not None:
            mask = _with_channels(mask, x)
        axes = [other for other in range(x.shape.rank) if other != axis]
        mean, variance = moments(x, axes, mask, self._process_set)
        self._move(self.moving_mean, mean)
        self._move(self.moving_variance, variance)
        shape = [x.shape[axis] if other == axis else 1 for other in range(x.shape.rank)]
        offset, scale = (
            tf.reshape(tf.cast(weight, x.dtype), shape) if wanted else None
            for weight, wanted in ((self.beta, self.center), (self.gamma, self.scale))
        )
        normalized = tf.nn.batch_normalization(x, mean, variance, offset, scale, self.epsilon)
        return tf.cast(normalized, inputs.dtype)

    def _move(self, moving: Any, value: tf.Tensor) -> None:
        value = tf.cast(tf.reshape(tf.stop_gradient(value), moving.shape), moving.dtype)
        moving.assign(moving * self.momentum + value * (1.0 - self.momentum))


def _with_channels(mask: Any, x: tf.Tensor) -> tf.Tensor:
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank != x.shape.rank - 1:
        raise ArgumentError(
            f"a mask has one axis less than the inputs; found {mask.shape} for {x.shape}"
        )
    return tf.expand_dims(mask, -1)


def _only(axis: Any) -> int:
    if isinstance(axis, int):
        return axis
    if len(axis) != 1:
        raise ArgumentError(f"SyncBatchNormalization takes one axis, found {list(axis)}")
    return int(axis[0])


def _check_backend() -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ArgumentError(
            f"this SyncBatchNormalization needs TensorFlow as Keras' backend, which is {backend}; "
            "set KERAS_BACKEND=tensorflow"
        )
