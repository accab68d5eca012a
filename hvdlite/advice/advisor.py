"""Measures how long a model's gradients take to be exchanged, by one strategy and another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hvdlite import collectives, runtime
from hvdlite.advice.model import parameters_of
from hvdlite.compression import DENSE, Compression, ErrorFeedback, Parameter, Reduction, Strategy
from hvdlite.engine import Engine
from hvdlite.gradients import GradientBuckets
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Max

#: From the gentlest on gradients to the harshest.
CANDIDATES: tuple[Strategy, ...] = (
    DENSE,
    Compression.bf16,
    Compression.fp16,
    ErrorFeedback(Compression.Blockwise8()),
    ErrorFeedback(Compression.PowerSGD(4)),
    ErrorFeedback(Compression.TopK(0.01)),
)

# A harsher strategy has to be so much faster than a gentler one.
_GAIN = 1.15
_MOST_ROUNDS = 7
_LEAST_ROUNDS = 2
# What the speed of the link is first estimated with.
_PROBE = Parameter("probe", (2**18,), np.dtype(np.float32))


@dataclass(frozen=True)
class Measurement:
    """How long one strategy takes.

    Attributes:
        strategy: which.
        seconds: for all gradients of a step, of the slowest rank; the median of several rounds.
    """

    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Advice:
    """What has been measured, and what to do.

    Attributes:
        size: the number of ranks.
        nbytes: of all gradients.
        measured: the part of them that was exchanged, to keep to the time given.
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
        """Bytes a second that a rank sends in a dense exchange: 2 (n - 1) / n of all gradients."""
        sent = 2 * (self.size - 1) / self.size * self.nbytes
        return sent / self.measurements[0].seconds if self.measurements else float("inf")

    def __str__(self) -> str:
        """A table and a sentence."""
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
        if self.compression == DENSE:
            return "use no compression: on these links it costs more than it saves"
        return f"use compression={self.compression!r}, and see what accuracy you get"


def advise(
    model: Any,
    candidates: Sequence[Strategy] = CANDIDATES,
    seconds: float = 20.0,
    process_set: ProcessSet = global_process_set,
) -> Advice:
    """Measure which compression makes exchanges of a model's gradients fastest here; collective.

    Gradients are random numbers. What is measured is an exchange alone: where the backward pass
    hides a part of it, less is to be gained. It says nothing of accuracy: of two strategies of
    nearly the same speed it takes the one that loses less, and the last word is yours.

    Args:
        model: of PyTorch, Keras or a ``tf.Module``; or a mapping of names to shapes or arrays.
            Alike on all ranks.
        candidates: what to choose from, from the gentlest to the harshest; the first is what
            the others are compared with.
        seconds: about how long it may take. Where the link is too slow for all gradients, only a
            part of them is exchanged.
        process_set: the ranks that take part.

    Returns:
        The same on all ranks.

    Raises:
        TypeError: it is no such model.
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
    """Some parameters, spread over the model, that have about this part of all bytes."""
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
    """For each candidate the median time of an exchange on the slowest rank, in turns.

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
