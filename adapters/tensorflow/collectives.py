"""The collectives on TensorFlow tensors, in eager mode and inside ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import collectives, reduction
from hvdlite.collectives import describe_allgather
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.tensorflow.graphs import for_session
from hvdlite.tensorflow.rank_ops import rank_op, set_size
from hvdlite.tensorflow.tensors import (
    CONVERSION,
    as_it_is,
    engine,
    like,
    rows_like,
    run,
    to_tensor,
)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Strategy = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks: ``postscale * op(prescale * tensor)``.

    Gradients flow through it: they are reduced by the same op. Min, Max and Product have
    no gradient here and raise in the backward pass.

    What all collectives raise is the same in eager mode and out of a ``tf.function``, and both
    hvdlite's and TensorFlow's: a MismatchError is a HorovodInternalError and a
    ``tf.errors.FailedPreconditionError``; any other HorovodInternalError is a
    ``tf.errors.UnknownError``; what is ValueError here is a ``tf.errors.InvalidArgumentError``.

    Args:
        tensor: a tensor, variable or array of any shape, alike on all ranks; bool, integers,
            floats of 16 to 64 bits; complex for Sum and Average. Or ``tf.IndexedSlices``,
            whose values and indices are gathered instead, without compression.
        average: deprecated; True is Average, False is Sum.
        device_dense: accepted for Horovod's sake, without effect; so is ``device_sparse``.
        compression: how floats travel.
        op: one of the six reductions; None is Average.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.
        ignore_name_scope: accepted for Horovod's sake: names never get a scope's prefix.

    Returns:
        A new tensor, alike to the bit on all ranks (slices of slices).

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype, or an operation of this name is still on its way.
        NotImplementedError: slices, and an op that is not Sum or Average, or a factor.
        MismatchError: the ranks disagree.
        HorovodInternalError: communication failed.
    """
    chosen = reduction.choose(average, op)
    strategy = check_strategy(compression, CONVERSION)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError("tf.IndexedSlices are reduced without scaling factors")
        return _allreduce_slices(tensor, chosen, name, process_set)
    factors = (prescale_factor, postscale_factor)
    return _allreduce(tensor, name, strategy, chosen, factors, process_set)


@as_it_is
def _allreduce(
    tensor: Any,
    name: str | None,
    compression: Strategy,
    op: ReduceOp,
    factors: tuple[float, float] = (1.0, 1.0),
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    def reduce(array: Any) -> list[Any]:
        result = collectives.allreduce(
            array,
            name=name,
            op=op,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            compression=compression,
            process_set=process_set,
        )
        return [result]

    @tf.custom_gradient
    def differentiable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            check_differentiable("allreduce", op)
            back = gradient_name(name)
            return _allreduce(upstream, back, compression, op, factors, process_set)

        (result,) = run(reduce, [tensor], [like(tensor)], process_set)
        return result, gradient

    return differentiable(to_tensor(tensor))


@as_it_is
def _allreduce_slices(
    slices: tf.IndexedSlices, op: ReduceOp, name: str | None, process_set: ProcessSet
) -> tf.IndexedSlices:
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"tf.IndexedSlices are reduced by Sum or Average, not {op.name.capitalize()}; "
            "convert them with tf.convert_to_tensor for other reductions"
        )
    values = allgather(slices.values, name and f"{name}.values", process_set=process_set)
    indices = allgather(slices.indices, name and f"{name}.indices", process_set=process_set)
    if op is ReduceOp.AVERAGE and values.dtype.is_integer:
        values, indices = _integer_mean(values, indices, set_size(process_set))
    elif op is ReduceOp.AVERAGE:
        values = tf.cast(values / tf.cast(set_size(process_set), values.dtype), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _integer_mean(
    values: tf.Tensor, indices: tf.Tensor, size: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up the slices of one index and divide, cut towards zero; the sums need not fit."""
    places, position = tf.unique(indices)
    count = tf.size(places)
    wide = values.dtype if values.dtype == tf.uint64 else tf.int64
    given, by = tf.cast(values, wide), tf.cast(size, wide)
    multiples = tf.math.floordiv(given, by)
    rests = tf.math.unsorted_segment_sum(given - multiples * by, position, count)
    mean = tf.math.unsorted_segment_sum(multiples, position, count) + tf.math.floordiv(rests, by)
    if wide == tf.int64:
        is_cut = tf.logical_and(mean < 0, tf.not_equal(tf.math.floormod(rests, by), 0))
        mean += tf.cast(is_cut, wide)
    return tf.cast(mean, values.dtype), places


@as_it_is
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along axis 0, in the order of the ranks.

    Gradients flow through it: each rank gets its own slice of the ranks' average gradient
    (the average, as in Horovod, although the sum is the derivative of the ranks' total).

    Args:
        tensor: all axes but the first alike on all ranks; a scalar counts as one row.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.
        ignore_name_scope: accepted for Horovod's sake: names never get a scope's prefix.

    Raises:
        MismatchError: the ranks disagree.
        HorovodInternalError: communication failed.
    """

    def gather(array: Any) -> list[Any]:
        whole, rows = engine(process_set).run(
            "allgather",
            name,
            lambda name: describe_allgather(array, name, with_rows=True),
        )
        rank = engine(process_set).rank
        start = sum(rows[:rank])
        return [whole, np.int64(start), np.int64(start + rows[rank])]

    @tf.custom_gradient
    def differentiable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        bound = tf.TensorSpec((), tf.int64)
        specs = [rows_like(tensor), bound, bound]
        whole, start, stop = run(gather, [tensor], specs, process_set)

        def gradient(upstream: Any) -> tf.Tensor:
            reduced = _average(upstream, gradient_name(name), process_set)
            return tf.reshape(reduced[start:stop], tf.shape(tensor))

        return whole, gradient

    return differentiable(to_tensor(tensor))


@as_it_is
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return rank ``root_rank``'s tensor on all ranks.

    Gradients flow through it: the root gets the ranks' average gradient, as in Horovod,
    the others zeros.

    Args:
        tensor: shape and dtype alike on all ranks.
        root_rank: the rank whose values count.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.
        ignore_name_scope: accepted for Horovod's sake: names never get a scope's prefix.

    Raises:
        ValueError: there is no such rank.
        MismatchError: the ranks disagree.
        HorovodInternalError: communication failed.
    """

    def spread(array: Any) -> list[Any]:
        return [collectives.broadcast(array, root_rank, name, process_set=process_set)]

    @tf.custom_gradient
    def differentiable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            reduced = _average(upstream, gradient_name(name), process_set)
            return tf.where(tf.equal(rank_op(), root_rank), reduced, tf.zeros_like(reduced))

        (result,) = run(spread, [tensor], [like(tensor)], process_set)
        return result, gradient

    return differentiable(to_tensor(tensor))


@as_it_is
def barrier(
    process_set: ProcessSet = global_process_set, name: str | None = None
) -> tf.Operation | None:
    """Return when every rank has called it; inside ``tf.function``, when it has run it.

    In a graph for a ``tf.compat.v1.Session`` return the operation that waits for the others.

    Args:
        process_set: the ranks that take part.
        name: pairs this call with those of the other ranks; None: by order.
    """

    def meet() -> list[Any]:
        collectives.barrier(process_set, name)
        return [np.int32(0)]

    (done,) = run(meet, [], [tf.TensorSpec((), tf.int32)], process_set)
    return done.op if for_session() else None


@as_it_is
def join(device: int = -1, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Tell that this rank has no more data, and wait until all ranks do so.

    See `hvdlite.join`. Inside ``tf.function``, it is done when that runs.

    Args:
        device: accepted for Horovod's sake, without effect.
        process_set: the ranks that take part.

    Returns:
        The rank that joined last, the same on all; an int32 tensor.
    """

    def wait() -> list[Any]:
        return [np.int32(collectives.join(process_set))]

    (last,) = run(wait, [], [tf.TensorSpec((), tf.int32)], process_set)
    return last


def check_differentiable(call: str, op: ReduceOp) -> None:
    """Refuse to make a gradient where there is none."""
    if op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        raise NotImplementedError(
            f"{call} with op={op.name.capitalize()} has no gradient; wrap its input in "
            "tf.stop_gradient, or use Sum or Average"
        )


def _average(tensor: Any, name: str | None, process_set: ProcessSet) -> tf.Tensor:
    return _allreduce(tensor, name, Compression.none, Average, process_set=process_set)


def gradient_name(name: str | None) -> str | None:
    """What the exchange of the gradient is called."""
    return None if name is None else f"{name}.gradient"
