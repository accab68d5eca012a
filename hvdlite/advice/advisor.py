"""Measurement of how long strategies take to exchange a model's gradients."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from hvdlite import collectives, runtime
from hvdlite.compression import DENSE, Compression, ErrorFeedback, Parameter, Reduction, Strategy
from hvdlite.engine import Engine
from hvdlite.gradients import GradientBuckets
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Max

#: The strategies that are compared, from the one that loses least to the one that loses most.
CANDIDATES: tuple[Strategy, ...] = (
    DENSE,
    Compression.bf16,
    Compression.fp16,
    ErrorFeedback(Compression.Blockwise8()),
    ErrorFeedback(Compression.PowerSGD(4)),
    ErrorFeedback(Compression.TopK(0.01)),
)

# A strategy that loses more must be faster by this factor.
_GAIN = 1.15
_MOST_ROUNDS = 7
_LEAST_ROUNDS = 2
# For a first estimate of the link's speed.
_PROBE = Parameter("probe", (2**18,), np.dtype(np.float32))


@dataclass(frozen=True)
class Measurement:
    """The time that one strategy takes.

    Attributes:
        strategy: the strategy.
        seconds: for all gradients of a step, on the slowest rank; the median of several rounds.
    """

    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Advice:
    """Measurements, and the recommended strategy.

    Attributes:
        size: the number of ranks.
        nbytes: of all gradients.
        measured: the fraction of them that was exchanged, to keep to the given time.
        measurements: in the order of the candidates; none on one rank.
        compression: the strategy to use, for ``DistributedOptimizer(..., compression=...)``.
    """

    size: int
    nbytes: int
    measured: float
    measurements: tuple[Measurement, ...]
    compression: Strategy

    @property
    def bandwidth(self) -> float:
        """Return bytes per second of a rank in a dense exchange: 2 (n - 1) / n of all gradients."""
        sent = 2 * (self.size - 1) / self.size * self.nbytes
        return sent / self.measurements[0].seconds if self.measurements else float("inf")

    def __str__(self) -> str:
        """Return a table and a recommendation."""
        if not self.measurements:
            return self._sentence()
        dense = self.measurements[0].seconds
        lines = [f"{self.size} ranks, {self.nbytes / 1e6:.1f} MB of gradients in a step"]
        if self.measured < 1:
            lines[0] += f", measured on {100 * self.measured:.0f} % of them"
        lines[0] += f"; a rank sends {self.bandwidth / 1e6:.0f} MB/s"
        width = max(len(repr(each.strategy)) for each in self.measurements)
        for each in self.measurements:
            faster = dense / each.seconds
            name = f"{each.strategy!r:{width}}"
            lines.append(f"  {name}  {1e3 * each.seconds:9.2f} ms  {faster:6.2f} x as fast")
        return "\n".join([*lines, self._sentence()])

    def _sentence(self) -> str:
        if self.size == 1:
            return "one rank exchanges nothing: use no compression"
        if self.compression.is_identity:
            return "use no compression: on these links it costs more than it saves"
        return f"use compression={self.compression!r}, and see what accuracy you get"


def advise(
    model: Any,
    candidates: Sequence[Strategy] = CANDIDATES,
    seconds: float = 20.0,
    process_set: ProcessSet = global_process_set,
) -> Advice:
    """Measure which compression makes exchanges of a model's gradients fastest here; collective.

    Gradients are random numbers. The measurement is of exchanges alone: if the backward pass hides
    a part of them, there is less to gain. It does not consider accuracy, except that of two
    strategies of nearly the same speed it takes the one that loses less; the decision is yours.

    Args:
        model: of PyTorch, Keras or a ``tf.Module``; or a mapping of names to shapes or arrays.
            The same on all ranks.
        candidates: the strategies to choose from, beginning with the one that loses least; the
            others are compared with the first.
        seconds: the approximate duration. If the link is too slow for all gradients, only a part
            of them is exchanged.
        process_set: the ranks that take part.

    Returns:
        The advice, the same on all ranks.

    Raises:
        TypeError: ``model`` is none of these.
        ValueError: the model has no parameters, or there are no candidates.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    if not candidates:
        raise ValueError("candidates is empty; leave it out for those that there are")
    parameters = parameters_of(model)
    engine = runtime.engine(process_set)
    nbytes = sum(parameter.nbytes for parameter in parameters)
    if engine.size == 1:
        return Advice(1, nbytes, 0.0, (), candidates[0])
    probe = _times(engine, "advise: probe", [_PROBE], candidates[:1], 0.0, process_set)[0]
    step = probe * nbytes / _PROBE.nbytes  # about as long as a dense step takes
    dense_steps = len(candidates) * (_LEAST_ROUNDS + 1)
    sampled = _sample(parameters, min(1.0, seconds / dense_steps / step))
    part = sum(parameter.nbytes for parameter in sampled) / nbytes
    times = _times(engine, "advise", sampled, candidates, seconds, process_set)
    measurements = tuple(
        Measurement(strategy, each / part) for strategy, each in zip(candidates, times, strict=True)
    )
    return Advice(engine.size, nbytes, part, measurements, _choose(measurements))


def _choose(measurements: Sequence[Measurement]) -> Strategy:
    best = measurements[0]
    for each in measurements[1:]:
        if each.seconds * _GAIN < best.seconds:
            best = each
    return best.strategy


def _sample(parameters: Sequence[Parameter], part: float) -> list[Parameter]:
    """Return parameters, spread over the model, with about this fraction of all bytes."""
    wanted = part * sum(parameter.nbytes for parameter in parameters)
    chosen: list[int] = []
    found = 0
    for number in np.random.default_rng(0).permutation(len(parameters)).tolist():
        size = parameters[number].nbytes
        if not chosen or found + size <= wanted * 1.01:
            chosen.append(number)
            found += size
    return [parameters[number] for number in sorted(chosen)]


def _times(
    engine: Engine,
    label: str,
    parameters: Sequence[Parameter],
    candidates: Sequence[Strategy],
    seconds: float,
    process_set: ProcessSet,
) -> list[float]:
    """Return the median time of an exchange on the slowest rank, for each candidate, in turns.

    There are as many rounds as ``seconds`` allow, within limits.
    """

    def slowest(times: Sequence[float], what: str) -> list[float]:
        own, name = np.array(times), f"{label}: {what}"
        found = collectives.allreduce(own, name=name, op=Max, process_set=process_set)
        return [float(each) for each in found]

    exchanges = [
        GradientBuckets(engine, f"{label}: {strategy!r}", parameters, strategy, Reduction())
        for strategy in candidates
    ]
    draw = np.random.default_rng(engine.rank).standard_normal
    gradients = [draw(p.shape, np.float32).astype(p.dtype) for p in parameters]
    warm_up = slowest([_seconds(each, gradients) for each in exchanges], "warm-up")
    rounds = int(seconds / sum(warm_up)) - 1
    rounds = min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)
    taken = [[_seconds(each, gradients) for each in exchanges] for _ in range(rounds)]
    return slowest([median(column) for column in zip(*taken, strict=True)], "times")


def _seconds(exchange: GradientBuckets, gradients: Sequence[Any]) -> float:
    exchange.compare()  # so that ranks begin together
    began = time.perf_counter()
    for index, members in enumerate(exchange.plan):
        exchange.start_bucket(index, {number: gradients[number] for number in members})
    for index in range(len(exchange.plan)):
        exchange.finish_bucket(index)
    return time.perf_counter() - began


def parameters_of(model: Any) -> list[Parameter]:
    """Return a model's trainable parameters.

    Args:
        model: with ``named_parameters()``, as in PyTorch, or ``trainable_variables``, as in Keras
            and ``tf.Module``; or a mapping of names to arrays, or to anything with shape and
            dtype, or to shapes (of float32).

    Raises:
        TypeError: ``model`` is none of these.
        ValueError: it has no parameters.
    """
    parameters = [_described(name, value) for name, value in _named(model)]
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters yet; build it first, by a call "
            "on a batch"
        )
    return parameters


def _named(model: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(model, Mapping):
        return list(model.items())
    if callable(getattr(model, "named_parameters", None)):
        return [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    variables = getattr(model, "trainable_variables", None)
    if variables is not None:
        return [(f"{n}: {getattr(each, 'name', '')}", each) for n, each in enumerate(variables)]
    raise TypeError(
        f"expected a model with named_parameters() or trainable_variables, or a mapping of names "
        f"to shapes; found {type(model).__name__}"
    )


def _described(name: str, value: Any) -> Parameter:
    if isinstance(value, (tuple, list)):
        return Parameter(name, tuple(value), np.dtype(np.float32))
    # "float32", "torch.float32" and "<dtype: 'float32'>" are all in use.
    kind = str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")
    return Parameter(name, tuple(value.shape), np.dtype(getattr(ml_dtypes, kind, kind)))
