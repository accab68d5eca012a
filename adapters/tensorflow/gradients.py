"""The exchange of gradients in buckets, in eager mode and inside ``tf.function``.

In a graph, one operation for each bucket starts its exchange when its gradients are computed, and a
last one waits for all of them. Small gradients that are neighbours in a bucket enter and leave
Python as one tensor, because TensorFlow concatenates and splits them faster than Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import tensorflow as tf

from hvdlite.base.reduction import Max, ReduceOp
from hvdlite.compression import Parameter, Reduction, StrategyState
from hvdlite.errors import HorovodInternalError, MismatchError, ranks_text
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.keras_exchange import Backend
from hvdlite.gradients.metadata import check_weighted, checked_samples
from hvdlite.gradients.options import Options
from hvdlite.gradients.replicas import ReplicaCheck
from hvdlite.gradients.sources import SourceExchange, exchange_of
from hvdlite.tensorflow.collectives import allreduce, grouped_allreduce
from hvdlite.tensorflow.errors import translated
from hvdlite.tensorflow.exchange_state import exchange_state
from hvdlite.tensorflow.graphs import count, in_order, numbered, together
from hvdlite.tensorflow.rank_ops import set_size
from hvdlite.tensorflow.tensors import engine, run, to_array, unconverted, value_of
from hvdlite.tensorflow.variables import Given, ReplicaChecks, named_variables, parameters_of, read
from hvdlite.world import world

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# Bytes from which on a gradient enters and leaves Python by itself, without a copy.
_SMALL = 2**16


@dataclass(frozen=True, eq=False)
class GradientAllreduce(Backend):
    """Reduces the gradients of any list of sources over all ranks.

    Dense gradients travel in buckets. ``tf.IndexedSlices`` are gathered, unless they are to be
    exchanged as dense gradients. A source without a gradient counts as zeros if another rank has
    a dense gradient for it.

    Attributes:
        label: The name of the exchanges in messages.
        checks: Compare the sources across ranks, unless these may differ.
        state: The state of the compression for all sources; None: one for each list of variables.
        leaves_out: Whether the caller, with ``HVDLITE_NOT_FINITE=skip``, leaves out steps whose
            averages are not finite; otherwise they are an error then.
    """

    options: Options
    label: str
    checks: ReplicaChecks
    state: StrategyState | None = None
    leaves_out: bool = False
    owner: ClassVar = "keras.tensorflow"

    @unconverted
    def reduce(
        self, gradients: Sequence[Gradient], sources: Sequence[Any], batch_size: Any = None
    ) -> list[Gradient]:
        options, process_set = self.options, self.options.process_set
        engine(process_set)
        samples = _samples(batch_size, options.reduction)
        gradients = densified(gradients, options)
        slices = {
            position: gradient
            for position, gradient in enumerate(gradients)
            if isinstance(gradient, tf.IndexedSlices)
        }
        is_adasum = options.reduction.op is ReduceOp.ADASUM
        if slices and (is_adasum or samples is not None):
            raise NotImplementedError(
                f"{'hvd.Adasum' if is_adasum else 'batch_size'} is not defined for "
                "tf.IndexedSlices; use sparse_as_dense=True"
            )
        state = self.state if options.strategy.stateful else None
        if options.strategy.stateful and state is None:
            state = exchange_state(sources).state
        spec = exchange_of(
            numbered(self.label, process_set),
            parameters_of(sources),
            options.strategy,
            options.reduction,
            process_set,
            state,
            frozenset(slices),
        )
        dense = {
            number: gradient
            for number, position in enumerate(spec.dense)
            if (gradient := gradients[position]) is not None
        }
        reduced: list[Gradient] = [None] * len(gradients)
        check, given, earlier = None, None, list[tf.Tensor]()
        if options.replicates:
            check, given = self.checks.of(sources, process_set, spec.label)
            if check is not None and given is None and not tf.executing_eagerly():
                earlier = _updates_before(self.checks, sources)
        with in_order(), tf.control_dependencies(earlier):
            if given is not None:
                variables = [v for v in map(value_of, sources) if isinstance(v, tf.Variable)]
                weights = list(map(tf.convert_to_tensor, variables))
                run(partial(_keep, given), weights, [], process_set)
            plan = [] if tf.executing_eagerly() else translated(spec.connect)().plan
            exchange = _DenseExchange(spec, plan, check, given, self.leaves_out)
            for number, gradient in exchange.run(dense, samples).items():
                reduced[spec.dense[number]] = gradient
            for position, gradient in slices.items():
                name = f"{spec.label}: {spec.parameters[position].name!r}"
                indices = tf.cast(gradient.indices, tf.int64)
                reduced[position] = allreduce(
                    tf.IndexedSlices(gradient.values, indices, gradient.dense_shape),
                    op=options.reduction.op,
                    name=name,
                    process_set=process_set,
                )
        # A session orders nothing by variables, and gives the exchange the values to compare.
        if check is not None and given is None and not tf.executing_eagerly():
            _hold_updates(sources, reduced)
        return reduced

    def divide_by_size(self, gradient: tf.Tensor | tf.IndexedSlices) -> Gradient:
        if isinstance(gradient, tf.IndexedSlices):
            values = self.divide_by_size(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(set_size(self.options.process_set), gradient.dtype)

    def are_finite(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        dense = [g for g in gradients if isinstance(g, tf.Tensor) and g.dtype.is_floating]
        return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(each)) for each in dense)])

    def describe(self, variables: Sequence[Any]) -> tuple[Parameter, ...]:
        return parameters_of(variables)

    def greatest(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        name, process_set = f"{self.label}: {variables[0].path!r}", self.options.process_set
        return grouped_allreduce(values, op=Max, name=name, process_set=process_set)


def _updates_before(checks: ReplicaChecks, sources: Sequence[Any]) -> list[tf.Tensor]:
    """Return what exists when the graph has made its earlier updates of what is compared.

    A script may set the rate in the graph that makes the step. Other variables are updated by an
    earlier step of the same graph, if it makes several, also for another part of the variables.
    """
    variables = checks.replica.option_variables()
    if count(("comparison", id(checks))):
        named = named_variables(sources)
        variables += [each for _, each in (*named, *checks.replica.state(named))]
    return [read(value_of(variable)) for variable in variables]


def _hold_updates(sources: Sequence[Any], reduced: Sequence[Gradient]) -> None:
    """Make updates of variables wait for the exchange that compares them.

    A graph orders operations by the variables that they use, but cannot see which ones a Python
    function reads. An update that uses no gradient, like weight decay, could come too early.
    """
    gradient = next((each for each in reduced if each is not None), None)
    if gradient is None:
        return
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    with tf.control_dependencies([gradient]):
        for variable in map(value_of, sources):
            if isinstance(variable, tf.Variable):
                read(variable)


def _keep(given: Given, *arrays: Any) -> list[Any]:
    given[:] = arrays
    return []


def densified(gradients: Sequence[Gradient], options: Options) -> list[Gradient]:
    """Return gradients, with ``tf.IndexedSlices`` as dense tensors if these are exchanged."""
    return [
        tf.convert_to_tensor(each)
        if options.sparse_as_dense and isinstance(each, tf.IndexedSlices)
        else each
        for each in gradients
    ]


def _samples(samples: Any, reduction: Reduction) -> Any:
    """Return a number of samples, or a graph's tensor, whose value is checked there."""
    if samples is None:
        return None
    check_weighted(reduction.op)
    if not tf.is_tensor(samples) or tf.executing_eagerly():
        return checked_samples(samples)
    if not samples.dtype.is_integer or samples.shape.rank not in (0, None):
        raise ValueError(f"batch_size is {samples}; expected a scalar of an integer type")
    return tf.cast(samples, tf.int64)


@dataclass(frozen=True, eq=False)
class _DenseExchange:
    """The exchange of dense gradients: now, or by operations of a graph.

    A graph keeps its methods `compare`, `start` and `finish`, so it has none of its tensors.

    Attributes:
        plan: The buckets at the time when a graph is made.
        given: What a graph for a session has given to the comparison; None: it is another one.
        leaves_out: As for `GradientBuckets.finish_bucket`.
    """

    spec: SourceExchange
    plan: list[list[int]]
    check: ReplicaCheck | None
    given: Given | None
    leaves_out: bool

    def run(self, gradients: Mapping[int, tf.Tensor], samples: Any) -> dict[int, tf.Tensor]:
        """Return the reduced gradients, in eager mode also those that only other ranks have."""
        numbers = list(gradients)
        exchange: Callable[..., list[tf.Tensor]] = partial(self._now, numbers, samples)
        if not tf.executing_eagerly():
            runs = [_runs_of(members, gradients, self.spec.in_buckets) for members in self.plan]
            numbers = [number for joined in runs for members in joined for number in members]
            exchange = partial(self._in_graph, runs, samples)

        # Second derivatives are reduced as the first ones are.
        @tf.custom_gradient
        def differentiable(*own: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            def gradient(*upstream: Any) -> list[tf.Tensor]:
                op, process_set = self.spec.reduction.op, self.spec.process_set
                return [
                    allreduce(tf.convert_to_tensor(each), op=op, process_set=process_set)
                    for each in upstream[: len(own)]
                ]

            return exchange(*own), gradient

        own = [gradients[number] for number in numbers]
        results = differentiable(*own) if own else exchange()
        return dict(zip(numbers, results, strict=True))

    def _now(self, numbers: list[int], samples: int | None, *own: tf.Tensor) -> list[tf.Tensor]:
        """Return averages of gradients by their numbers, to which it appends other ranks'."""
        tensors = dict(zip(numbers, own, strict=True))

        def find(number: int) -> Any:
            return to_array(tensors[number]) if number in tensors else None

        found = translated(self.spec.run)(find, samples, self.check, self.leaves_out)
        anywhere = (number for number, average in enumerate(found) if average is not None)
        numbers.extend(number for number in anywhere if number not in tensors)
        return [tf.convert_to_tensor(found[number]) for number in numbers]

    def _in_graph(
        self, runs: Sequence[Sequence[Sequence[int]]], samples: Any, *own: tf.Tensor
    ) -> list[tf.Tensor]:
        """Add the operations of a graph; ``runs`` has for each bucket what `_runs_of` returns."""
        process_set, parameters = self.spec.process_set, self.spec.in_buckets
        weight = [] if samples is None else [tf.convert_to_tensor(samples, tf.int64)]
        if not self.plan:
            run(self.compare, [], [], process_set)
        tensors = iter(own)
        for index, joined in enumerate(runs):
            flat = [_concatenate([next(tensors) for _ in numbers]) for numbers in joined]
            start = partial(self.start, index, [numbers[0] for numbers in joined])
            run(start, [*flat, *weight], [], process_set)
        # All buckets start before the first wait. A bucket without a waiter would block the next
        # step.
        wanted = [numbers for joined in runs for numbers in joined]
        shapes = [[parameters[number].shape for number in numbers] for numbers in wanted]
        specs = [
            tf.TensorSpec(each[0] if len(each) == 1 else (None,), parameters[numbers[0]].dtype)
            for each, numbers in zip(shapes, wanted, strict=True)
        ]
        found = run(partial(self.finish, wanted), [], specs, process_set)
        parts = [_split(tensor, each) for tensor, each in zip(found, shapes, strict=True)]
        return together([tensor for part in parts for tensor in part])

    def compare(self) -> list[Any]:
        """Compare the ranks' sources, as the first bucket does, where there is no bucket."""
        self.spec.connect().compare(self.check)
        return []

    def start(self, index: int, numbers: Sequence[int], *arrays: Any) -> list[Any]:
        """Start the exchange of a bucket: some gradients, and the number of samples, if given."""
        exchange = self.spec.connect()  # in the world in which the graph runs
        if exchange.plan != self.plan:
            raise HorovodInternalError(
                f"rank {world.rank()}: the sizes of buckets (HVDLITE_FUSION_THRESHOLD, "
                "HVDLITE_FIRST_BUCKET_SIZE) have changed since a tf.function was traced; make the "
                "function again after init()"
            )
        gradients = dict(zip(numbers, map(np.asarray, arrays), strict=False))
        samples = checked_samples(arrays[-1]) if len(arrays) > len(numbers) else None
        exchange.start_bucket(index, gradients, samples, self.check)
        return []

    def finish(self, runs: Sequence[Sequence[int]]) -> list[Any]:
        """Wait for all buckets, and return the averages that are wanted, neighbours as one."""
        exchange = self.spec.connect()
        try:
            found = [exchange.finish_bucket(n, self.leaves_out) for n in range(len(self.plan))]
            for members, presence in zip(self.plan, found, strict=True):
                _check_presence(exchange, members, presence)
            exchange.count_step()
        finally:
            if self.given is not None:
                self.given.clear()  # the ranks have compared them
        return [exchange.result_of(numbers) for numbers in runs]


def _runs_of(
    members: Sequence[int], gradients: Mapping[int, Any], parameters: Sequence[Parameter]
) -> list[list[int]]:
    """Return the gradients of a bucket that are here, small neighbours together."""
    runs: list[list[int]] = []
    joins = False  # whether the next one may be joined to the last
    for number in members:
        is_small = 0 < parameters[number].nbytes < _SMALL
        may_join = number in gradients and is_small
        if may_join and joins:
            runs[-1].append(number)
        elif number in gradients:
            runs.append([number])
        joins = may_join
    return runs


def _check_presence(exchange: GradientBuckets, members: Sequence[int], presence: Any) -> None:
    """Refuse a gradient that only some ranks have: the graphs' structures are fixed."""
    if presence.all():
        return
    for position in np.flatnonzero(presence.any(axis=0) & ~presence.all(axis=0)).tolist():
        ids = exchange.lane.transport.members
        have, lack = (
            [ids[rank] for rank in np.flatnonzero(each).tolist()]
            for each in (presence[:, position], ~presence[:, position])
        )
        raise MismatchError(
            f"the gradient of {exchange.parameters[members[position]].name!r} is None on "
            f"{ranks_text(lack)} but not on {ranks_text(have)}, and a tf.function cannot turn one "
            "into the other; on all ranks, call gradient(..., "
            "unconnected_gradients=tf.UnconnectedGradients.ZERO)"
        )


def _concatenate(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return several tensors as a flat one, and a single one as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _split(tensor: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [tensor]
    parts = tf.split(tensor, [math.prod(shape) for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
