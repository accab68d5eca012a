"""Ranks of the compression benchmark, and of `hvdlite.advise`, which measures the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np

from hvdlite import collectives
from hvdlite.base.reduction import Max
from hvdlite.compression import DENSE, Compression, ErrorFeedback, Parameter, Reduction, Strategy
from hvdlite.engine import Engine, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.tools.bench.job import say
from hvdlite.tools.bench.measurement import Contender, Ranks, compare, interleave
from hvdlite.tools.bench.report import count_text, table, time_text
from hvdlite.tools.bench.workloads import WORKLOADS

#: The strategies that are compared, from the one that loses least to the one that loses most.
CANDIDATES: Mapping[str, Strategy] = {
    "none": DENSE,
    "bf16": Compression.bf16,
    "fp16": Compression.fp16,
    "blockwise8": ErrorFeedback(Compression.Blockwise8()),
    "powersgd": ErrorFeedback(Compression.PowerSGD(4)),
    "topk": ErrorFeedback(Compression.TopK(0.01)),
}

# A strategy that loses more must be faster by this factor.
_GAIN = 1.15
_MOST_ROUNDS = 7
_LEAST_ROUNDS = 2
# For a first estimate of the link's speed.
_PROBE = Parameter("probe", (2**18,), np.dtype(np.float32))


@dataclass(frozen=True)
class Measurement:
    """The seconds that a strategy takes for all gradients of a step, on the slowest rank.

    They are the median of several rounds.
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
        if self.size == 1:
            return "one rank exchanges nothing: use no compression"
        head = f"{self.size} ranks, {self.nbytes / 1e6:.1f} MB of gradients in a step"
        if self.measured < 1:
            head += f", measured on {100 * self.measured:.0f} % of them"
        head += f"; a rank sends {self.bandwidth / 1e6:.0f} MB/s"
        dense = self.measurements[0].seconds
        rows = [
            (repr(each.strategy), time_text(each.seconds), f"{dense / each.seconds:.2f} x as fast")
            for each in self.measurements
        ]
        advice = f"use compression={self.compression!r}, and see what accuracy you get"
        if self.compression.is_identity:
            advice = "use no compression: on these links it costs more than it saves"
        return "\n".join([head, table(["compression", "exchange", ""], rows), advice])


def measure(
    comm: Any, framework: str, contenders: Sequence[str], workload: str, limit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time exchanges of one model's gradients, by `CANDIDATES`' names; collective."""
    title = f"gradients of {WORKLOADS[workload].title} in {framework}"
    say(comm, f"{title} on {count_text(comm.size, 'rank')}")
    runtime.init(comm)
    parameters = parameters_of(import_module(f"hvdlite.{framework}.benchmark").build(workload))
    candidates = {name: CANDIDATES[name] for name in contenders}
    exchanges = _exchanges(runtime.engine(), "bench", parameters, candidates)
    times = interleave(Ranks(comm), exchanges, **limit)
    advice = _choose(comm.size, parameters, 1.0, candidates, times)
    runtime.shutdown()
    record = {
        "framework": framework,
        "workload": workload,
        "title": title,
        "ranks": comm.size,
        "bytes": advice.nbytes,
        **compare(times, "none"),
        "advice": str(advice),
    }
    return [record]


def advise(
    model: Any,
    candidates: Sequence[Strategy] = tuple(CANDIDATES.values()),
    seconds: float = 20.0,
    process_set: ProcessSet = global_process_set,
) -> Advice:
    """Measure which compression makes exchanges of a model's gradients fastest here; collective.

    Gradients are random numbers. The measurement is of exchanges alone: if the backward pass hides
    a part of them, there is less to gain. It does not consider accuracy, except that of two
    strategies of nearly the same speed it takes the one that loses less; the decision is yours.

    Args:
        model: of PyTorch, Keras or a ``tf.Module``; or a mapping of names to arrays, to anything
            with a shape and a dtype, or to shapes (of float32). The same on all ranks.
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
    engine, ranks = runtime.engine(process_set), _Ranks(process_set)
    by_name = {repr(strategy): strategy for strategy in candidates}
    nbytes = sum(parameter.nbytes for parameter in parameters)
    if engine.size == 1:
        return Advice(1, nbytes, 0.0, (), candidates[0])
    probe = _exchanges(engine, "advise: probe", [_PROBE], {"": candidates[0]})
    limited = partial(interleave, ranks, seconds=seconds, at_least=_LEAST_ROUNDS)
    (found,) = limited(probe, rounds=_LEAST_ROUNDS).values()
    step = float(np.median(found)) * nbytes / _PROBE.nbytes  # about as long as a dense step takes
    dense_steps = len(candidates) * (_LEAST_ROUNDS + 1)
    sampled = _sample(parameters, min(1.0, seconds / dense_steps / step))
    exchanges = _exchanges(engine, "advise", sampled, by_name)
    times = limited(exchanges, rounds=_MOST_ROUNDS)
    part = sum(parameter.nbytes for parameter in sampled) / nbytes
    return _choose(engine.size, parameters, part, by_name, times)


def _choose(
    size: int,
    parameters: Sequence[Parameter],
    measured: float,
    candidates: Mapping[str, Strategy],
    times: Mapping[str, Any],
) -> Advice:
    measurements = tuple(
        Measurement(strategy, float(np.median(times[name])) / measured)
        for name, strategy in candidates.items()
    )
    best = measurements[0]
    for each in measurements[1:]:
        if each.seconds * _GAIN < best.seconds:
            best = each
    nbytes = sum(parameter.nbytes for parameter in parameters)
    return Advice(size, nbytes, measured, measurements, best.strategy)


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


class _Ranks(Ranks):
    """The ranks of a process set, by collectives that tell of a rank that does not come."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set

    def meet(self) -> None:
        collectives.barrier(process_set=self._process_set)

    def slowest(self, times: Any) -> Any:
        own = np.array(times, np.float64)
        return collectives.allreduce(own, name="advise", op=Max, process_set=self._process_set)


def _exchanges(
    engine: Engine, label: str, parameters: Sequence[Parameter], candidates: Mapping[str, Strategy]
) -> list[Contender]:
    """Return contenders that exchange random gradients and have done so once; collective."""
    draw = np.random.default_rng(engine.rank).standard_normal
    gradients = [draw(p.shape, np.float32).astype(p.dtype) for p in parameters]
    contenders = []
    for name, strategy in candidates.items():
        buckets = GradientBuckets(engine, f"{label}: {name}", parameters, strategy, Reduction())
        contenders.append(Contender(name, partial(buckets.exchange, gradients.__getitem__)))
        contenders[-1].call()
    return contenders


def parameters_of(model: Any) -> list[Parameter]:
    """Return a model's trainable parameters; ``model`` is one as for `advise`.

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
