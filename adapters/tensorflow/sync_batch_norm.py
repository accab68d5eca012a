"""Batch normalization over the batches of all ranks, as a layer of the Keras in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.base.reduction import Sum
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.collectives import allgather, allreduce
from hvdlite.tensorflow.errors import ArgumentError
from hvdlite.tensorflow.graphs import refuse_session
from hvdlite.tensorflow.tensors import to_tensor, unconverted
from hvdlite.world import parts

# Keras 3, or tf_keras where TF_USE_LEGACY_KERAS is set.
keras = tf.keras


@keras.utils.register_keras_serializable(package="hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[name-defined]
    """``BatchNormalization`` that uses the statistics of all ranks' batches in training.

    The forward and the backward pass each make one small exchange, in which all ranks must take
    part; their batches may have different sizes, including 0, and different masks. 16-bit floats
    are normalized in float32. In inference it is the layer that it derives from, so a program
    without hvdlite can load a saved model if it gives Keras a layer of this name::

        @keras.saving.register_keras_serializable(package="hvdlite")
        class SyncBatchNormalization(keras.layers.BatchNormalization):
            pass

    Args:
        axis: The axis of the channels, one number.
        momentum: The momentum of the moving statistics, which are the same on all ranks.
        epsilon: Added to the variance.
        fused: Accepted as in Horovod, if it is False or None.
        process_set: The ranks that take part. It is not saved.
        kwargs: All other arguments of ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: Keras' backend is not TensorFlow, or the arguments ask for several axes, a
            fused layer, batch renormalization or virtual batches. In training: inside a
            function that XLA compiles, or in the scope of a strategy with several replicas.
        MismatchError: In training, the ranks disagree on the channels.
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
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise ArgumentError(
                "this SyncBatchNormalization needs TensorFlow as Keras' backend, which is "
                f"{backend}; set KERAS_BACKEND=tensorflow"
            )
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
        parts.current.refuse(
            "SyncBatchNormalization",
            "use keras.layers.BatchNormalization, and pass model= to DistributedOptimizer",
        )
        inputs = to_tensor(inputs)
        # Narrower floats have too few digits for sums, and too small a range for squares.
        x = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        axis = _only(self.axis) % x.shape.rank
        if mask is not None:
            mask = tf.convert_to_tensor(mask)
            if mask.shape.rank != x.shape.rank - 1:
                raise ArgumentError(
                    f"a mask has one axis less than the inputs; found {mask.shape} for {x.shape}"
                )
            mask = tf.expand_dims(mask, -1)
        axes = [other for other in range(x.shape.rank) if other != axis]
        mean, variance, count = _moments(x, axes, mask, self._process_set)
        self._move(self.moving_mean, mean, count)
        self._move(self.moving_variance, variance, count)
        shape = [x.shape[axis] if other == axis else 1 for other in range(x.shape.rank)]
        offset, scale = (
            tf.reshape(tf.cast(weight, x.dtype), shape) if wanted else None
            for weight, wanted in ((self.beta, self.center), (self.gamma, self.scale))
        )
        normalized = tf.nn.batch_normalization(x, mean, variance, offset, scale, self.epsilon)
        return tf.cast(normalized, inputs.dtype)

    def _move(self, moving: Any, value: tf.Tensor, count: tf.Tensor) -> None:
        """Move a statistic towards a value, where there are elements that it is of."""
        value, count = (tf.reshape(tf.stop_gradient(each), moving.shape) for each in (value, count))
        value = tf.where(count > 0, tf.cast(value, moving.dtype), moving)
        moving.assign(moving * self.momentum + value * (1.0 - self.momentum))


def _only(axis: Any) -> int:
    if isinstance(axis, int):
        return axis
    if len(axis) != 1:
        raise ArgumentError(f"SyncBatchNormalization takes one axis, found {list(axis)}")
    return int(axis[0])


@unconverted
def _moments(
    x: tf.Tensor, axes: Sequence[int], mask: Any, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the mean, the variance and the count of all ranks' elements along some axes.

    Each rank sums its own elements in two passes, and the parts are combined as in Chan, Golub and
    LeVeque (1983, "Algorithms for computing the sample variance"), so a large mean takes no
    digits from a small variance. There is one exchange, of three float64 for each channel, and
    one of two numbers in the backward pass, which gives the gradient of the sum of all ranks'
    losses and has no derivative itself.

    Args:
        x: float32 or float64; the axes that stay have the same sizes on all ranks, the others
            any size, including 0.
        mask: Selects elements, with a shape that can be broadcast to that of ``x``; None: all.

    Returns:
        Mean, (biased) variance and count, with the reduced axes kept as 1.
    """
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(x))
    joint: tuple[tf.Tensor, ...] = ()

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
        nonlocal joint
        joint = _combine(_local(x, axes, mask), process_set)
        count, mean, variance = (tf.cast(each, x.dtype) for each in joint)

        @tf.custom_gradient
        def gradient(*upstream: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            of_mean, of_variance = tf.unstack(
                allreduce(tf.stack(upstream), op=Sum, process_set=process_set)
            )
            slope = _counted(of_mean + 2.0 * of_variance * (x - mean), mask)
            return tf.math.divide_no_nan(slope, count), _refuse

        return (mean, variance), gradient

    mean, variance = differentiable(x)
    return mean, variance, joint[0]


def _counted(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    return values if mask is None else tf.where(mask, values, tf.zeros_like(values))


def _local(x: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None) -> list[tf.Tensor]:
    """Return this rank's count, mean, and sum of squared deviations per channel, in float64."""
    if mask is None:
        ones = tf.ones([1 if axis in axes else x.shape[axis] for axis in range(x.shape.rank)])
        elements = tf.reduce_prod([tf.shape(x, tf.int64)[axis] for axis in axes])
        count = tf.cast(ones, tf.float64) * tf.cast(elements, tf.float64)
    else:
        count = tf.reduce_sum(tf.cast(mask, tf.float64), axes, keepdims=True)

    def sum_of(values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.reduce_sum(values, axes, keepdims=True), tf.float64)

    rough = tf.cast(tf.math.divide_no_nan(sum_of(_counted(x, mask)), count), x.dtype)
    # The rounding error of the mean is as large as many a deviation.
    deviations = _counted(x - rough, mask)
    rest = tf.math.divide_no_nan(sum_of(deviations), count)
    squares = sum_of(tf.square(deviations)) - count * tf.square(rest)
    return [count, tf.cast(rough, tf.float64) + rest, tf.maximum(squares, 0.0)]


def _combine(
    local: list[tf.Tensor], process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return count, mean and variance of all ranks' elements from what `_local` returned."""
    parts = allgather(tf.stack(local)[tf.newaxis], process_set=process_set)
    counts, means, all_squares = tf.unstack(parts, num=3, axis=1)
    total = tf.reduce_sum(counts, 0)
    joint = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    between = counts * tf.square(means - joint)
    variance = tf.math.divide_no_nan(tf.reduce_sum(all_squares + between, 0), total)
    return total, joint, variance


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "the statistics of SyncBatchNormalization have no second derivative; use "
        "keras.layers.BatchNormalization where you need one"
    )
