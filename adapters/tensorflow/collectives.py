"""Collectives on TensorFlow tensors, in eager mode and inside ``tf.function``.

Each family has one differentiable function of a list of tensors, which serves the call for one
tensor and the one for a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import collectives
from hvdlite.base import reduction
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.collectives import Route, run_alltoall
from hvdlite.collectives.recorded import RecordedCall, members
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.graphs import for_session
from hvdlite.tensorflow.rank_ops import integer, set_size
from hvdlite.tensorflow.tensors import CONVERSION, like, rows_like, run, to_tensor, unconverted
from hvdlite.world import world

# The public names of `hvdlite.tensorflow`.
__all__ = [
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
    "join",
    "barrier",
]

_REMEDY = "wrap its input in tf.stop_gradient"


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

    Gradients flow through it: they are reduced by the same op. Min, Max and Product have no
    gradient here and raise in the backward pass.

    All collectives raise the same errors in eager mode and out of a ``tf.function``, and each is
    both hvdlite's and TensorFlow's: a MismatchError is a HorovodInternalError and a
    ``tf.errors.FailedPreconditionError``; any other HorovodInternalError is a
    ``tf.errors.UnknownError``; a ValueError is a ``tf.errors.InvalidArgumentError``.

    Args:
        tensor: A tensor, variable or array of any shape, the same on all ranks; bool, integers,
            floats of 16 to 64 bits; complex for Sum and Average. Or ``tf.IndexedSlices``,
            whose values and indices are gathered instead, without compression.
        average: Deprecated; True is Average, False is Sum.
        device_dense, device_sparse: Accepted as in Horovod, without effect.
        compression: How floats travel.
        op: One of the six reductions; None is Average.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        name: Pairs this call with those of the other ranks; None pairs by order.
        process_set: The ranks that take part.
        ignore_name_scope: Accepted as in Horovod; names never get a scope's prefix.

    Returns:
        A new tensor, bitwise the same on all ranks (slices for slices). Integers stay integers, and
        an average is rounded towards zero, also of slices, for which Horovod returns floats: a
        dense tensor and its slices then have the same average and dtype.

    Raises:
        ValueError: ``op`` and ``average`` contradict each other, the reduction is not defined for
            the dtype, or an operation of this name is still in flight.
        NotImplementedError: Slices with an op other than Sum and Average, or with a factor.
        MismatchError: The ranks disagree.
        HorovodInternalError: Communication failed.
    """
    chosen = reduction.choose(average, op)
    strategy = check_strategy(compression, CONVERSION)
    call = RecordedCall(
        False, name, process_set, chosen, prescale_factor, postscale_factor, strategy
    )
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(call, tensor)
    return _allreduce(call, [tensor])[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Strategy = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors over all ranks as one unit; see `allreduce`.

    No tensor is reduced before every rank has submitted all, and if one is refused, all are.
    ``tf.IndexedSlices`` among them are gathered one by one.

    Args:
        tensors: At least one, of any shapes and dtypes, the same on all ranks.

    Raises:
        ValueError: As `allreduce`; there is no tensor.
        MismatchError, HorovodInternalError: As for `allreduce`.
    """
    chosen = reduction.choose(average, op)
    strategy = check_strategy(compression, CONVERSION)
    call = RecordedCall(
        True, name, process_set, chosen, prescale_factor, postscale_factor, strategy
    )
    results = members(tensors, tf.Tensor, tf.Variable)
    dense = [n for n, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    for number, each in enumerate(results):
        if isinstance(each, tf.IndexedSlices):
            own = None if name is None else f"{name}.{number}"
            results[number] = _allreduce_slices(call._replace(name=own), each)
    if dense:
        reduced = _allreduce(call, [results[number] for number in dense])
        for number, result in zip(dense, reduced, strict=True):
            results[number] = result
    return results


@unconverted
def _allreduce(call: RecordedCall, tensors: Sequence[Any]) -> list[tf.Tensor]:
    def reduce(*arrays: Any) -> Any:
        return call.reduce(arrays, collectives.allreduce, collectives.grouped_allreduce)

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: Any) -> list[tf.Tensor]:
            call.check_differentiable("allreduce", _REMEDY)
            return _of_given(partial(_allreduce, call.backward()), upstream)

        return run(reduce, tensors, list(map(like, tensors)), call.process_set), gradient

    return list(differentiable(*map(to_tensor, tensors)))


def _of_given(function: Callable[..., list[Any]], upstream: Sequence[Any]) -> list[Any]:
    """Return a function's results for gradients: a graph may have None, such as for integers."""
    given = [number for number, each in enumerate(upstream) if each is not None]
    found = dict(zip(given, function([upstream[number] for number in given]), strict=True))
    return list(map(found.get, range(len(upstream))))


@unconverted
def _allreduce_slices(call: RecordedCall, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    op = call.op
    if (call.prescale_factor, call.postscale_factor) != (1.0, 1.0):
        raise NotImplementedError("tf.IndexedSlices are reduced without scaling factors")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"tf.IndexedSlices are reduced by Sum or Average, not {op.name.capitalize()}; "
            "convert them with tf.convert_to_tensor for other reductions"
        )
    # As one unit: should a rank die, both are from the same ranks.
    parts = slices.values, slices.indices
    (values, indices), size = _allgather(call._replace(grouped=True), parts)
    if op is ReduceOp.AVERAGE and values.dtype.is_integer:
        values, indices = _integer_mean(values, indices, size)
    elif op is ReduceOp.AVERAGE:
        values = tf.cast(values / tf.cast(size, values.dtype), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _integer_mean(
    values: tf.Tensor, indices: tf.Tensor, size: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up the slices of each index and divide, rounding towards zero; sums need not fit."""
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
        tensor: All axes but the first are the same on all ranks; a scalar counts as one row.
        name, process_set, ignore_name_scope: As for `allreduce`.

    Raises:
        MismatchError, HorovodInternalError: As for `allreduce`.
    """
    (whole,), _ = _allgather(RecordedCall(False, name, process_set), [tensor])
    return whole


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors as one unit; see `allgather` and `grouped_allreduce`."""
    wholes, _ = _allgather(
        RecordedCall(True, name, process_set), members(tensors, tf.Tensor, tf.Variable)
    )
    return wholes


@unconverted
def _allgather(call: RecordedCall, tensors: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return what has been gathered, and the number of ranks that it is from."""

    def gather(*arrays: Any) -> list[Any]:
        found = call.gather(arrays)
        spans = [np.array(each.span, np.int64) for each in found]
        return [*(each.whole for each in found), *spans, np.int32(len(found[0].rows))]

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        spans = [tf.TensorSpec((2,), tf.int64)] * len(tensors)
        specs = [*map(rows_like, tensors), *spans, tf.TensorSpec((), tf.int32)]
        *found, size = run(gather, tensors, specs, call.process_set)
        wholes, spans = found[: len(tensors)], found[len(tensors) :]

        def gradient(*upstream: Any) -> list[tf.Tensor]:
            reduced = _of_given(partial(_allreduce, call.backward_average()), upstream[:-1])
            return [
                None
                if whole is None
                else tf.reshape(whole[span[0] : span[0] + span[1]], tf.shape(tensor))
                for whole, span, tensor in zip(reduced, spans, tensors, strict=True)
            ]

        return [*wholes, size], gradient

    *wholes, size = differentiable(*map(to_tensor, tensors))
    return wholes, size


@unconverted
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
        tensor: The shape and dtype are the same on all ranks.
        root_rank: The rank whose values are sent.
        name, process_set, ignore_name_scope: As for `allreduce`.

    Raises:
        ValueError: There is no such rank.
        MismatchError, HorovodInternalError: As for `allreduce`.
    """
    call = RecordedCall(False, name, process_set)

    def spread(array: Any) -> list[Any]:
        # Asked now: a rank may have another number in the backward pass.
        is_root = np.bool_(world.rank() == root_rank)
        return [collectives.broadcast(array, root_rank, name, process_set=process_set), is_root]

    @tf.custom_gradient
    def differentiable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            (reduced,) = _allreduce(call.backward_average(), [upstream])
            return tf.where(is_root, reduced, tf.zeros_like(reduced))

        specs = [like(tensor), tf.TensorSpec((), tf.bool)]
        result, is_root = run(spread, [tensor], specs, process_set)
        return result, gradient

    return differentiable(to_tensor(tensor))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows of a tensor to every rank, and receive some of theirs.

    Gradients flow through it, back to where the rows came from.

    Args:
        tensor: It has at least one axis; all but the first are the same on all ranks.
        splits: The number of rows for each rank that takes part, in their order: integers that
            add up to the number of rows. None sends the same number to all.
        name, process_set, ignore_name_scope: As for `allreduce`.

    Returns:
        The received rows, in the order of the ranks that sent them; with ``splits`` given, a
        pair of these and an int32 tensor with the number of rows from each rank.

    Raises:
        ValueError: The splits do not fit, or an operation of this name is still in flight.
        MismatchError, HorovodInternalError: As for `allreduce`.
    """
    counts = [] if splits is None else [tf.convert_to_tensor(splits)]
    rows, received = _alltoall(RecordedCall(False, name, process_set), tensor, counts)
    return rows if splits is None else (rows, received)


@unconverted
def _alltoall(
    call: RecordedCall, tensor: Any, how: Sequence[tf.Tensor], is_back: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchange rows.

    Args:
        how: The splits, if there are any; or a `collectives.Route` to send them back.
    """

    def exchange(array: Any, *numbers: Any) -> list[Any]:
        given = [np.asarray(each) for each in numbers]
        splits = None if is_back or not given else given[0]
        back = Route(*(each.tolist() for each in given)) if is_back else None
        rows, route = run_alltoall(array, splits, call.name, call.process_set, back)
        return [rows, *(np.array(each, np.int32) for each in route)]

    @tf.custom_gradient
    def differentiable(
        tensor: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        specs = [rows_like(tensor), *[tf.TensorSpec((None,), tf.int32)] * len(Route._fields)]
        rows, *route = run(exchange, [tensor, *how], specs, call.process_set)

        def gradient(upstream: Any, _: Any = None) -> tf.Tensor:
            back, _ = _alltoall(call.backward(), upstream, route, is_back=True)
            return tf.reshape(back, tf.shape(tensor))

        return (rows, route[-1]), gradient

    rows, received = differentiable(to_tensor(tensor))
    return rows, received


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Strategy = Compression.none,
    op: ReduceOp | int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks, and return this rank's rows of the result.

    Gradients flow through it, for Sum and Average: those of all rows are gathered and, as in
    Horovod, multiplied by the number of ranks for Sum (although it is Average that divides).

    Args:
        tensor: It has at least one axis; shape and dtype are the same on all ranks. If the rows
            cannot be divided evenly, the first ranks get one more.
        compression: How floats travel: ``Compression.none``, ``.fp16`` or ``.bf16``.
        op: Average, Sum, Min, Max or Product.
        device_dense, name, process_set, ignore_name_scope, prescale_factor, postscale_factor: As
            for `allreduce`.

    Raises:
        ValueError: ``op`` is Adasum or not defined for the dtype, or an operation of this name is
            still in flight.
        MismatchError, HorovodInternalError: As for `allreduce`.
    """
    check_strategy(compression)
    chosen = reduction.choose(None, op)
    call = RecordedCall(
        False, name, process_set, chosen, prescale_factor, postscale_factor, compression
    )
    return _reducescatter(call, [tensor])[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Strategy = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors as one unit; see `reducescatter`, `grouped_allreduce`."""
    check_strategy(compression)
    chosen = reduction.choose(None, op)
    call = RecordedCall(
        True, name, process_set, chosen, prescale_factor, postscale_factor, compression
    )
    return _reducescatter(call, members(tensors, tf.Tensor, tf.Variable))


@unconverted
def _reducescatter(call: RecordedCall, tensors: Sequence[Any]) -> list[tf.Tensor]:
    def reduce(*arrays: Any) -> Any:
        return call.reduce(arrays, collectives.reducescatter, collectives.grouped_reducescatter)

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def scaled(upstream: tf.Tensor) -> tf.Tensor:
            factor = tf.cast(call.prescale_factor * call.postscale_factor, upstream.dtype)
            if call.op is ReduceOp.SUM:
                factor *= tf.cast(set_size(call.process_set), upstream.dtype)
            return upstream * factor

        def gradient(*upstream: Any) -> list[tf.Tensor]:
            call.check_differentiable("reducescatter", _REMEDY)
            wholes = _of_given(
                lambda given: _allgather(call.backward(), list(map(scaled, given)))[0], upstream
            )
            return [
                None if whole is None else tf.reshape(whole, tf.shape(tensor))
                for whole, tensor in zip(wholes, tensors, strict=True)
            ]

        return run(reduce, tensors, list(map(rows_like, tensors)), call.process_set), gradient

    return list(differentiable(*map(to_tensor, tensors)))


@unconverted
def barrier(
    process_set: ProcessSet = global_process_set, name: str | None = None
) -> tf.Operation | None:
    """Wait until every rank has called it; inside ``tf.function``, until every rank has run it.

    In a graph for a ``tf.compat.v1.Session``, return the operation that waits for the others.

    Args:
        process_set, name: As for `allreduce`.
    """

    def meet() -> int:
        collectives.barrier(process_set, name)
        return 0

    done = integer(meet, process_set)
    return done.op if for_session() else None


@unconverted
def join(device: int = -1, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Announce that this rank has no more data, and wait until all ranks have joined.

    See `hvdlite.join`. Inside ``tf.function``, it happens when the graph runs.

    Args:
        device: Accepted as in Horovod, without effect.
        process_set: The ranks that take part.

    Returns:
        The rank that joined last, the same on all; an int32 tensor.
    """
    return integer(lambda: collectives.join(process_set), process_set)
