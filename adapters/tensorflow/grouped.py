"""The collectives on lists of TensorFlow tensors, which run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import collectives, reduction
from hvdlite.compression import Compression, Strategy, check_strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.tensorflow.collectives import allreduce, check_differentiable, gradient_name
from hvdlite.tensorflow.scattering import reducescatter_factor
from hvdlite.tensorflow.tensors import CONVERSION, as_it_is, engine, like, rows_like, run, to_tensor


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

    None is reduced before every rank has submitted all, and if one is refused, all are.
    ``tf.IndexedSlices`` among them are gathered one by one.

    Args:
        tensors: one at least, of any shapes and dtypes, alike on all ranks.

    Raises:
        ValueError: as `allreduce`; there is no tensor.
        MismatchError: the ranks disagree.
        HorovodInternalError: communication failed.
    """
    chosen = reduction.choose(average, op)
    strategy = check_strategy(compression, CONVERSION)
    factors = prescale_factor, postscale_factor
    listed = _checked(tensors)
    dense = [n for n, each in enumerate(listed) if not isinstance(each, tf.IndexedSlices)]
    results: list[Any] = list(listed)
    for number, each in enumerate(listed):
        if number not in dense:
            own = None if name is None else f"{name}.{number}"
            results[number] = allreduce(
                each, None, "", "", strategy, chosen, *factors, own, process_set
            )
    if dense:
        chunk = [listed[number] for number in dense]
        reduced = _allreduce(chunk, name, strategy, chosen, factors, process_set)
        for number, result in zip(dense, reduced, strict=True):
            results[number] = result
    return results


@as_it_is
def _allreduce(
    tensors: Sequence[Any],
    name: str | None,
    compression: Strategy,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    def reduce(*arrays: Any) -> list[Any]:
        return collectives.grouped_allreduce(
            arrays, None, name, op, *factors, compression=compression, process_set=process_set
        )

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: Any) -> list[tf.Tensor]:
            check_differentiable("grouped_allreduce", op)
            back = gradient_name(name)
            return _allreduce(upstream, back, compression, op, factors, process_set)

        return run(reduce, tensors, list(map(like, tensors)), process_set), gradient

    return list(differentiable(*map(to_tensor, tensors)))


@as_it_is
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors as one unit; see `allgather` and `grouped_allreduce`."""

    def gather(*arrays: Any) -> list[Any]:
        handle = collectives.grouped_allgather_async(
            arrays, name, with_rows=True, process_set=process_set
        )
        rank = engine(process_set).rank
        results = handle.wait()
        bounds = [np.int64([sum(rows[:rank]), sum(rows[: rank + 1])]) for _, rows in results]
        return [*(whole for whole, _ in results), *bounds]

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        bounds = [tf.TensorSpec((2,), tf.int64)] * len(tensors)
        specs = [*map(rows_like, tensors), *bounds]
        found = run(gather, tensors, specs, process_set)
        wholes, bounds = found[: len(tensors)], found[len(tensors) :]

        def gradient(*upstream: Any) -> list[tf.Tensor]:
            back = gradient_name(name)
            arguments = Compression.none, Average, (1.0, 1.0), process_set
            reduced = _allreduce(upstream, back, *arguments)
            return [
                tf.reshape(whole[bound[0] : bound[1]], tf.shape(tensor))
                for whole, bound, tensor in zip(reduced, bounds, tensors, strict=True)
            ]

        return wholes, gradient

    return list(differentiable(*map(to_tensor, _checked(tensors))))


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
    """Do `reducescatter` for several tensors as one unit; see `grouped_allreduce`."""
    check_strategy(compression)
    chosen = reduction.choose(None, op)
    factors = prescale_factor, postscale_factor
    return _reducescatter(_checked(tensors), compression, chosen, process_set, factors, name)


@as_it_is
def _reducescatter(
    tensors: Sequence[Any],
    compression: Strategy,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float],
    name: str | None,
) -> list[tf.Tensor]:
    def reduce(*arrays: Any) -> list[Any]:
        return collectives.grouped_reducescatter(
            arrays, name, op, *factors, compression=compression, process_set=process_set
        )

    @tf.custom_gradient
    def differentiable(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: Any) -> list[tf.Tensor]:
            own = [
                each * reducescatter_factor(op, factors, each.dtype, process_set)
                for each in upstream
            ]
            wholes = grouped_allgather(own, gradient_name(name), process_set=process_set)
            return [
                tf.reshape(whole, tf.shape(tensor))
                for whole, tensor in zip(wholes, tensors, strict=True)
            ]

        return run(reduce, tensors, list(map(rows_like, tensors)), process_set), gradient

    return list(differentiable(*map(to_tensor, tensors)))


def _checked(tensors: Sequence[Any]) -> list[Any]:
    if isinstance(tensors, tf.Tensor | tf.Variable):
        raise TypeError("expected a list of tensors, found a tensor")
    listed = list(tensors)
    if not listed:
        raise ValueError("a grouped collective needs one tensor at least; found none")
    return listed
