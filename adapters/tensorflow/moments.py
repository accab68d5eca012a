"""Mean and variance over all ranks, differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Sum
from hvdlite.tensorflow.collectives import allgather, allreduce
from hvdlite.tensorflow.tensors import as_it_is


@as_it_is
def moments(
    x: tf.Tensor,
    axes: Sequence[int],
    mask: Any = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance of all ranks' elements along some axes.

    Each rank sums up its own elements in two passes, and the parts are joined as Chan, Golub and
    LeVeque do (1983, "Algorithms for computing the sample variance"), so a large mean takes no
    digits from a small variance. There is one exchange, of three float64 for each channel, and
    one of two numbers in the backward pass, which gives the gradient of the sum of all ranks'
    losses and has no derivative itself.

    Args:
        x: float32 or float64; the axes that stay are of the same sizes on all ranks, the others
            of any size, which may be 0.
        axes: to reduce, from 0.
        mask: which elements count, of a shape that can be broadcast to that of ``x``; None: all.
        process_set: the ranks that take part.

    Returns:
        Mean and (biased) variance, with the axes that were reduced kept as 1.
    """
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(x))

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
        joint = _join(*_local(x, axes, mask), process_set)
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
    return mean, variance


def _counted(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    return values if mask is None else tf.where(mask, values, tf.zeros_like(values))


def _local(x: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None) -> tuple[tf.Tensor, ...]:
    """This rank's count, mean, and sum of squared deviations of each channel, in float64."""
    if mask is None:
        ones = tf.ones([1 if axis in axes else x.shape[axis] for axis in range(x.shape.rank)])
        elements = tf.reduce_prod([tf.shape(x, tf.int64)[axis] for axis in axes])
        count = tf.cast(ones, tf.float64) * tf.cast(elements, tf.float64)
    else:
        count = tf.reduce_sum(tf.cast(mask, tf.float64), axes, keepdims=True)

    def sum_of(values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.reduce_sum(values, axes, keepdims=True), tf.float64)

    rough = tf.cast(tf.math.divide_no_nan(sum_of(_counted(x, mask)), count), x.dtype)
    # What that type cannot say of the mean is as large as many a deviation.
    deviations = _counted(x - rough, mask)
    rest = tf.math.divide_no_nan(sum_of(deviations), count)
    squares = sum_of(tf.square(deviations)) - count * tf.square(rest)
    return count, tf.cast(rough, tf.float64) + rest, tf.maximum(squares, 0.0)


def _join(
    count: tf.Tensor, mean: tf.Tensor, squares: tf.Tensor, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Count, mean and variance of all ranks' elements, from those of each."""
    parts = allgather(tf.stack([count, mean, squares])[tf.newaxis], process_set=process_set)
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
