"""Gradients on their way through buckets, in eager mode and inside ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import HorovodInternalError, MismatchError, collectives, world
from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.engine.agreement import ranks_text
from hvdlite.gradients import (
    GradientBuckets,
    ReplicaCheck,
    check_weighted,
    checked_samples,
    plan_for,
)
from hvdlite.interrupts import leave, uninterrupted
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp
from hvdlite.tensorflow.collectives import allreduce
from hvdlite.tensorflow.graphs import in_order, numbered, together
from hvdlite.tensorflow.layout import Layout
from hvdlite.tensorflow.memory import state_of
from hvdlite.tensorflow.names import unique_names
from hvdlite.tensorflow.replicas import Replicas
from hvdlite.tensorflow.tensors import dtype_of, engine, run

Gradient = tf.Tensor | tf.IndexedSlices | None


class Reducer:
    """Reduces the gradients of any list of sources over all ranks.

    Dense gradients travel in buckets. ``tf.IndexedSlices`` are gathered, unless they are
    to be exchanged as dense ones. A source without a gradient counts as zeros where another
    rank has a dense one.

    Args:
        strategy: how buckets travel.
        reduction: sum or average.
        sparse_as_dense: make dense gradients of ``tf.IndexedSlices``.
        process_set: the ranks that take part.
        label: what messages call the exchanges.
        state: what the strategy remembers of all sources; None: there is one for each list of
            variables.
        replicas: compares the sources across ranks; None: they may differ.
    """

    def __init__(
        self,
        strategy: Strategy,
        reduction: Reduction,
        sparse_as_dense: bool,
        process_set: ProcessSet = global_process_set,
        label: str = "DistributedGradientTape",
        state: StrategyState | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._replicas = replicas
        self._label = label
        self._strategy = strategy
        self._reduction = reduction
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._state = state

    def reduce(
        self,
        gradients: Sequence[Gradient],
        sources: Sequence[Any],
        samples: Any = None,
    ) -> list[Gradient]:
        """Return the reduced gradients.

        Args:
            gradients: of this rank.
            sources: what they are the gradients of; names, shapes and dtypes alike on all
                ranks.
            samples: of how many samples this rank's gradients are averages, a number or a scalar
                tensor, which weights the average over the ranks; None, on all ranks: they count
                alike.

        Raises:
            ValueError: ``samples`` is no number of samples, or comes with another reduction than
                an average.
            MismatchError: the ranks disagree.
            HorovodInternalError: communication failed.
        """
        engine(self._process_set)
        weight = [] if samples is None else [_samples(samples, self._reduction)]
        if self._sparse_as_dense:
            gradients = [_dense(gradient) for gradient in gradients]
        slices = {
            position: gradient
            for position, gradient in enumerate(gradients)
            if isinstance(gradient, tf.IndexedSlices)
        }
        if slices and self._reduction.op is ReduceOp.ADASUM:
            raise NotImplementedError(
                "hvd.Adasum is not defined for tf.IndexedSlices; use sparse_as_dense=True"
            )
        if slices and samples is not None:
            raise NotImplementedError(
                "batch_size is not defined for tf.IndexedSlices; use sparse_as_dense=True"
            )
        layout = Layout(
            numbered(self._label, self._process_set),
            _describe(sources),
            frozenset(slices),
            self._strategy,
            self._reduction,
            self._process_set,
            self._remembered(sources),
        )
        dense = {
            number: gradients[position]
            for number, position in enumerate(layout.dense)
            if gradients[position] is not None
        }
        reduced: list[Gradient] = [None] * len(gradients)
        check = self._replicas and self._replicas.check_of(sources, self._process_set)
        with in_order():
            for number, gradient in _exchange(layout, dense, weight, check).items():
                reduced[layout.dense[number]] = gradient
            for position, gradient in slices.items():
                reduced[position] = _gather(layout, position, gradient)
        return reduced

    def _remembered(self, sources: Sequence[Any]) -> StrategyState | None:
        if not self._strategy.stateful:
            return None
        return state_of(sources).state if self._state is None else self._state


def _samples(samples: Any, reduction: Reduction) -> tf.Tensor:
    """A number of samples as a tensor; if it is one of a graph, its value is checked there."""
    check_weighted(reduction.op)
    if not tf.is_tensor(samples) or tf.executing_eagerly():
        return tf.constant(checked_samples(samples), tf.int64)
    if not samples.dtype.is_integer or samples.shape.rank not in (0, None):
        raise ValueError(f"batch_size is {samples}; expected a scalar of an integer type")
    return tf.cast(samples, tf.int64)


def _describe(sources: Sequence[Any]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(name, _shape(name, source), dtype_of(source.dtype))
        for name, source in zip(unique_names(sources), sources, strict=True)
    )


def _shape(name: str, source: Any) -> tuple[int, ...]:
    shape = tf.TensorShape(source.shape)
    if not shape.is_fully_defined():
        if not tf.executing_eagerly():
            raise ValueError(
                f"{name!r} has the static shape {shape} inside tf.function, and buckets need to "
                "know all of it; give it one with tf.ensure_shape, or call gradient() eagerly"
            )
        shape = tf.convert_to_tensor(source).shape
    return tuple(shape.as_list())


def _dense(gradient: Gradient) -> tf.Tensor | None:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _exchange(
    layout: Layout,
    gradients: Mapping[int, tf.Tensor],
    weight: list[tf.Tensor],
    check: ReplicaCheck | None,
) -> dict[int, tf.Tensor]:
    """Exchange dense gradients, by their number; return those that any rank has."""
    settings = engine(layout.process_set).settings
    parameters = [layout.parameters[position] for position in layout.dense]
    plan = plan_for(parameters, layout.strategy, settings)
    if not plan:
        run(lambda: _compare(layout, check), [], [], layout.process_set)
    here = [number for members in plan for number in members if number in gradients]
    foreign: list[int] = []  # those that only other ranks have; in eager mode

    @uninterrupted  # a step is sent whole, or not at all
    def start(own: Mapping[int, tf.Tensor]) -> None:
        for index in range(len(plan)):
            _start(layout, plan, index, own, weight, check)

    def exchange(*tensors: tf.Tensor) -> list[tf.Tensor]:
        own = dict(zip(here, tensors, strict=True))
        try:
            start(own)
        finally:
            leave()
        # All are on their way before the first is waited for.
        found: dict[int, tf.Tensor] = {}
        for index in range(len(plan)):
            found.update(_finish(layout, plan, index, own))
        foreign.extend(number for number in found if number not in own)
        # A bucket that nobody waits for would be in the way of the next step.
        return together([found[number] for number in (*here, *foreign)])

    own = [gradients[number] for number in here]
    results = _differentiable(exchange, own, layout)
    return dict(zip((*here, *foreign), results, strict=True))


def _start(
    layout: Layout,
    plan: list[list[int]],
    index: int,
    own: Mapping[int, tf.Tensor],
    weight: list[tf.Tensor],
    check: ReplicaCheck | None,
) -> None:
    """Start the exchange of a bucket: at once, or by one operation of the graph."""
    here = [number for number in plan[index] if number in own]

    def start(*given: Any) -> list[Any]:
        arrays, samples = given[: len(here)], map(checked_samples, given[len(here) :])
        exchange = layout.connect()  # in the world that there is when the graph runs
        _check_plan(exchange, plan)
        gradients = dict(zip(here, map(np.asarray, arrays), strict=True))
        exchange.start_bucket(index, gradients, *samples, check=check)
        return []

    run(start, [*(own[number] for number in here), *weight], [], layout.process_set)


def _finish(
    layout: Layout, plan: list[list[int]], index: int, own: Mapping[int, tf.Tensor]
) -> dict[int, tf.Tensor]:
    """Wait for a bucket; return the averages of the gradients that are here, or anywhere."""
    eager = tf.executing_eagerly()
    parameters = {number: layout.parameters[layout.dense[number]] for number in plan[index]}
    wanted = [number for number in plan[index] if number in own]

    def finish() -> list[Any]:
        exchange = layout.connect()
        presence = exchange.finish_bucket(index)
        if eager:
            anywhere = zip(plan[index], presence.any(axis=0), strict=True)
            wanted[:] = [number for number, has in anywhere if has]
        else:
            _check_presence(exchange, plan[index], presence)
        return [exchange.result(index)]

    sizes = {number: parameter.size for number, parameter in parameters.items()}
    dtype = tf.as_dtype(parameters[plan[index][0]].dtype)
    specs = [tf.TensorSpec((sum(sizes.values()),), dtype)]
    (flat,) = run(finish, [], specs, layout.process_set)
    parts = dict(zip(sizes, tf.split(flat, list(sizes.values())), strict=True))
    return {number: tf.reshape(parts[number], parameters[number].shape) for number in wanted}


def _compare(layout: Layout, check: ReplicaCheck | None) -> list[Any]:
    """Do what buckets do besides, where there is none: see that the ranks' layouts are alike."""
    layout.connect().compare(check)
    return []


def _check_plan(exchange: GradientBuckets, plan: list[list[int]]) -> None:
    if exchange.plan != plan:
        raise HorovodInternalError(
            f"rank {world.rank()}: the sizes of buckets (HVDLITE_FUSION_THRESHOLD, "
            "HVDLITE_FIRST_BUCKET_SIZE) have changed since a tf.function was traced; make the "
            "function anew after init()"
        )


def _check_presence(exchange: GradientBuckets, members: Sequence[int], presence: Any) -> None:
    """Refuse a gradient that only some ranks have: the graphs' structures are fixed."""
    for position in np.flatnonzero(presence.any(axis=0) & ~presence.all(axis=0)):
        have = np.flatnonzero(presence[:, position]).tolist()
        lack = np.flatnonzero(~presence[:, position]).tolist()
        raise MismatchError(
            f"the gradient of {exchange.parameters[members[position]].name!r} is None on "
            f"{ranks_text(lack)} but not on {ranks_text(have)}, and a tf.function cannot turn one "
            "into the other; on all ranks, call gradient(..., "
            "unconnected_gradients=tf.UnconnectedGradients.ZERO)"
        )


def _differentiable(
    exchange: Callable[..., list[tf.Tensor]], own: Sequence[tf.Tensor], layout: Layout
) -> list[tf.Tensor]:
    """Call ``exchange``, so that second derivatives are reduced as the first ones are."""
    if not own:
        return exchange()

    @tf.custom_gradient
    def call(*own: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: Any) -> list[tf.Tensor]:
            return [
                allreduce(
                    tf.convert_to_tensor(each),
                    op=layout.reduction.op,
                    process_set=layout.process_set,
                )
                for each in upstream[: len(own)]
            ]

        return exchange(*own), gradient

    return list(call(*own))


def _gather(layout: Layout, position: int, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Gather the slices of all ranks."""
    parameter = layout.parameters[position]
    name = f"{layout.label}: {parameter.name!r}"

    def gather(values: Any, indices: Any) -> list[Any]:
        handles = [
            collectives.allgather_async(values, f"{name} values", process_set=layout.process_set),
            collectives.allgather_async(indices, f"{name} indices", process_set=layout.process_set),
        ]
        all_values, all_indices = [handle.wait() for handle in handles]
        return [
            layout.reduction.whole(engine(layout.process_set).size).apply(all_values),
            all_indices,
        ]

    specs = [
        tf.TensorSpec((None, *parameter.shape[1:]), gradient.values.dtype),
        tf.TensorSpec((None,), tf.int64),
    ]
    indices = tf.cast(gradient.indices, tf.int64)
    gathered = run(gather, [gradient.values, indices], specs, layout.process_set)
    return tf.IndexedSlices(*gathered, gradient.dense_shape)
