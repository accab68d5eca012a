"""Collectives on TensorFlow tensors that give every rank something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import collectives, reduction
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.tensorflow.collectives import allgather, gradient_name
from hvdlite.tensorflow.rank_ops import set_size
from hvdlite.tensorflow.tensors import as_it_is, rows_like, run, to_tensor


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send every rank some rows of a tensor, and receive some of theirs.

    Gradients flow through it, back to where the rows came from.

    Args:
        tensor: at least one axis; all but the first alike on all ranks.
        splits: for each rank that takes part how many rows it gets, in their order: integers that
            add up to the number of rows. None: the same number for all.
        name: pairs this call with those of the other ranks; None: by order.
        ignore_name_scope: accepted for Horovod's sake: names never get a scope's prefix.
        process_set: the ranks that take part.

    Returns:
        The rows that came, in the order of the ranks they came from; with ``splits`` given, a
        pair of these and an int32 tensor of how many came from each.

    Raises:
        ValueError: the splits do not fit, or an operation of this name is still on its way.
        MismatchError: the ranks disagree.
        HorovodInternalError: communication failed.
    """
    rows, received = _alltoall(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


@as_it_is
def _alltoall(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    def exchange(array: Any, *counts: Any) -> list[Any]:
        given = np.asarray(counts[0]) if counts else None
        return list(collectives.alltoall(array, given, name, process_set=process_set))

    counts = [] if splits is None else [tf.convert_to_tensor(splits)]

    @tf.custom_gradient
    def differentiable(
        tensor: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        specs = [rows_like(tensor), tf.TensorSpec((None,), tf.int32)]
        rows, received = run(exchange, [tensor, *counts], specs, process_set)

        def gradient(upstream: Any, _: Any = None) -> tf.Tensor:
            back, _ = _alltoall(upstream, received, gradient_name(name), process_set)
            return tf.reshape(back, tf.shape(tensor))

        return (rows, received), gradient

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

    Gradients flow through it, for Sum and Average: those of all rows are gathered, and, as in
    Horovod, multiplied with the number of ranks for Sum (although it is Average that divides).

    Args:
        tensor: at least one axis; shape and dtype alike on all ranks. The first ranks get one
            row more where there are not as many for all.
        device_dense: accepted for Horovod's sake, without effect.
        compression: how floats travel: ``Compression.none``, ``.fp16`` or ``.bf16``.
        op: Average, Sum, Min, Max or Product.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.
        ignore_name_scope: accepted for Horovod's sake: names never get a scope's prefix.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Raises:
        ValueError: ``op`` is Adasum or has no meaning for the dtype, or an operation of this name
            is still on its way.
        MismatchError: the ranks disagree.
        HorovodInternalError: communication failed.
    """
    check_strategy(compression)
    chosen = reduction.choose(None, op)
    factors = prescale_factor, postscale_factor
    return _reducescatter(tensor, compression, chosen, name, process_set, factors)


@as_it_is
def _reducescatter(
    tensor: Any,
    compression: Strategy,
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
    factors: tuple[float, float],
) -> tf.Tensor:
    def reduce(array: Any) -> list[Any]:
        result = collectives.reducescatter(
            array, name, op, *factors, compression=compression, process_set=process_set
        )
        return [result]

    @tf.custom_gradient
    def differentiable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        (rows,) = run(reduce, [tensor], [rows_like(tensor)], process_set)

        def gradient(upstream: Any) -> tf.Tensor:
            own = upstream * reducescatter_factor(op, factors, upstream.dtype, process_set)
            whole = allgather(own, gradient_name(name), process_set=process_set)
            return tf.reshape(whole, tf.shape(tensor))

        return rows, gradient

    return differentiable(to_tensor(tensor))


def reducescatter_factor(
    op: ReduceOp, factors: tuple[float, float], dtype: tf.DType, process_set: ProcessSet
) -> tf.Tensor:
    """What the gradient of a reducescatter is multiplied with.

    Raises:
        NotImplementedError: the op has no gradient.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"reducescatter with op={op.name.capitalize()} has no gradient; wrap its input in "
            "tf.stop_gradient, or use Sum or Average"
        )
    factor = tf.cast(factors[0] * factors[1], dtype)
    return factor * tf.cast(set_size(process_set), dtype) if op is ReduceOp.SUM else factor
