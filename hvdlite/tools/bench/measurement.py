"""Time several contenders that take turns in the same processes; medians, spreads and ratios."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Samples = np.ndarray[Any, Any]

_PATIENCE = 300.0
_SHORTEST_SLEEP, _MAX_SLEEP = 5e-5, 0.02
_RESAMPLES = 2000


@dataclass(frozen=True)
class Contender:
    """Something to be timed.

    Attributes:
        inputs: filled with ones before each turn, so that every contender finds the same
            values, just written by its own rank.
        outputs: the results, asked for after each call: they may lie elsewhere every time.
    """

    name: str
    call: Callable[[], object]
    inputs: Sequence[Samples] = ()
    outputs: Callable[[], Sequence[Samples]] = tuple

    def prepare(self, value: float = 1.0) -> None:
        """Fill the inputs."""
        for array in self.inputs:
            array.fill(value)


class Ranks:
    """The ranks of a communicator, which measure together; all methods are collective."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def meet(self) -> None:
        """Wait for all ranks, and leave together.

        A rank that is early sleeps between looks, an eighth of the time waited so far: in MPI's
        barrier it would spin, and take a core from those that still compute. It has to look,
        because another rank's collective may need this one to make progress. The barrier at the end
        makes up for unequal sleeps.
        """
        request, start = self._comm.Ibarrier(), time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            time.sleep(min(max(waited / 8, _SHORTEST_SLEEP), _MAX_SLEEP))
        self._comm.Barrier()

    def slowest(self, times: Any) -> Samples:
        """Return the greatest of all ranks' times, one by one."""
        watch()
        found: Samples = np.max(self._comm.allgather(times), axis=0)
        return found


def watch(seconds: float = _PATIENCE) -> None:
    """Print the stacks and end this rank, and so the job, unless called again within that time."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def rounds(ranks: Ranks, rounds: int, seconds: float, at_least: int) -> Iterator[int]:
    """Yield the number of each round, for some seconds; the first clock to run out decides."""
    end = time.monotonic() + seconds
    for done in range(rounds):
        if ranks.slowest([time.monotonic() > end and done >= at_least])[0]:
            return
        yield done


def order(count: int, turn: int) -> list[int]:
    """Return the order of a round: rotated by one each time, backwards in every other.

    So each contender is as often first as any other, and comes after different ones.
    """
    rotated = [(turn // 2 + position) % count for position in range(count)]
    return rotated[::-1] if turn % 2 else rotated


def timed(call: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of one call, out of several in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def interleave(
    ranks: Ranks, contenders: Sequence[Contender], calls: int = 1, **limit: Any
) -> dict[str, Samples]:
    """Let the contenders take turns; collective.

    Args:
        contenders: the same on all ranks.
        calls: in a row within a turn.
        limit: as for `rounds`.

    Returns:
        For each contender the seconds of one call in each round, on the slowest rank.
    """
    rows = []
    for turn in rounds(ranks, **limit):
        row = np.empty(len(contenders))
        for index in order(len(contenders), turn):
            contenders[index].prepare()
            ranks.meet()
            row[index] = timed(contenders[index].call, calls)
            ranks.meet()  # else the next inputs are filled on cores that slower ranks still need
        rows.append(row)
    slowest = ranks.slowest(rows)
    return {contender.name: slowest[:, index] for index, contender in enumerate(contenders)}


# Statistics


def compare(times: Mapping[str, Samples], than: str = "hvdlite") -> dict[str, Any]:
    """Return the part of a record that has the times of all contenders.

    Returns:
        ``rounds``; ``seconds`` and ``ratios`` (how many times as long as ``than``, within each
        round) as `summary`; and ``samples``, the times themselves.
    """
    return {
        "rounds": len(times[than]),
        "seconds": {name: summary(samples) for name, samples in times.items()},
        "ratios": {
            name: summary(samples / times[than]) for name, samples in times.items() if name != than
        },
        "samples": {name: samples.tolist() for name, samples in times.items()},
    }


def summary(samples: Samples) -> dict[str, float]:
    """Return the median, and as spread the 10th and 90th percentile."""
    low, median, high = np.percentile(samples, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def overhead_ratio(over: Samples, under: Samples, alone: Samples) -> dict[str, float]:
    """Return the ratio of two median overheads, with a bootstrap interval of 80 %.

    Rounds are drawn again with replacement (Efron 1979, Annals of Statistics 7), whole, because
    the samples of one round belong together.
    """
    draws = np.random.default_rng(0).integers(len(alone), size=(_RESAMPLES, len(alone)))
    values = _ratio_of_medians(over[draws], under[draws], alone[draws])
    return {**summary(values), "median": float(_ratio_of_medians(over, under, alone))}


def _ratio_of_medians(over: Samples, under: Samples, alone: Samples) -> Samples:
    ratios: Samples = np.median(over - alone, axis=-1) / np.median(under - alone, axis=-1)
    return ratios
