"""Measured at the start: how many bytes of gradients, and of users' arrays, travel at a time.

Only where the ranks of one node exchange through memory that they share, for less than half a
second, and once for a machine: the result is stored in the user's cache folder
(``tuning_cache``). A network is left alone: what a handful of large messages at the start of a
job tell of it depends on everybody else's, and they would be in everybody else's way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hvdlite import tuning_cache
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.settings import Settings
from hvdlite.transport import Transport

_log = logging.getLogger("hvdlite")

_MIB = 2**20
#: Bytes of a chunk that are tried.
CHUNKS = (_MIB // 4, _MIB // 2, _MIB, 2 * _MIB)
#: Bytes of a bucket that are tried.
CAPS = (4 * _MIB, 8 * _MIB, Settings.fusion_threshold)
# What is exchanged in chunks, and what is exchanged in buckets; of the latter's caps the largest
# stands for a single bucket. More would cost more time for the pages than for the exchange.
_ARRAY_BYTES, _MODEL_BYTES = 8 * _MIB, 16 * _MIB
# Nothing is measured later than this many seconds after the start.
_SECONDS, _ROUNDS, _FEWEST_ROUNDS = 0.3, 5, 2
# What differs by less is noise, or not worth it.
_MARGIN = 0.1

# What this process has settled, by the number of ranks: a graph that was traced with these
# buckets goes on to work after another init(), even if nothing could be stored.
_settled: dict[int, Tuning] = {}

Clock = Callable[[], float]


@dataclass(frozen=True)
class Tuning:
    """What the start has settled, alike on all ranks.

    Attributes:
        bucket_cap: bytes after which a gradient bucket is closed.
        chunk: bytes of a user's array that travel at a time; None: the transport has no such
            choice.
    """

    bucket_cap: int
    chunk: int | None


def tune(
    transport: Transport,
    connect: Callable[[], Transport],
    settings: Settings,
    clock: Clock = time.perf_counter,
) -> Tuning:
    """Choose sizes for this machine; collective.

    Rank 0's ``autotune`` decides whether anything is measured, and its memory and its cache
    whether that has been done before. A cap that is set stays as it is, on each rank.

    Args:
        transport: that the ranks agree over; measured where it has chunks.
        connect: makes another such transport, collectively; what is measured goes with it, so
            that its memory is not kept.
        settings: of this rank.
        clock: seconds.

    Raises:
        RankGoneError: another rank has ended meanwhile.
    """
    if transport.chunk is None:
        return Tuning(settings.fusion_threshold, None)
    with _leaving(transport):
        chosen = _choose(transport, connect, settings.autotune, clock)
    if settings.is_given("fusion_threshold"):
        return replace(chosen, bucket_cap=settings.fusion_threshold)
    return chosen


def choose(seconds: Any, default: Tuning) -> Tuning | None:
    """Choose from the times of what was tried.

    A chunk other than the default has to be faster by more than a tenth. Of the caps it is
    the smallest that is not slower than the best by more: small buckets leave earlier, and
    less of the exchange is left when the last gradient is there.

    Args:
        seconds: shape (ranks, rounds, ``len(CHUNKS) + len(CAPS)``).
        default: its chunk is one of `CHUNKS`.

    Returns:
        None where there are too few rounds to tell.
    """
    if seconds.shape[1] < _FEWEST_ROUNDS:
        return None
    # An exchange has ended when its last rank has. Whatever else the machine does makes times
    # longer, so the short ones tell more; the shortest of many may be a freak.
    slowest = seconds.max(axis=0)
    short = np.quantile(slowest, 0.25, axis=0, method="lower").tolist()
    chunks = dict(zip(CHUNKS, short[: len(CHUNKS)], strict=True))
    caps = dict(zip(CAPS, short[len(CHUNKS) :], strict=True))
    chunk = default.chunk
    best = min(chunks, key=lambda size: chunks[size])
    if chunk is None or chunks[best] < (1 - _MARGIN) * chunks[chunk]:
        chunk = best
    limit = (1 + _MARGIN) * min(caps.values())
    return Tuning(min(cap for cap, taken in caps.items() if taken <= limit), chunk)


def measure(transport: Transport, clock: Clock = time.perf_counter) -> Any:
    """Time the exchange with all sizes in turns, until that is enough or takes too long.

    Rank 0 looks at the clock for all.

    Returns:
        Seconds, as `choose` takes them; the same on every rank.
    """
    start = clock()
    probes = _probes(transport)
    for probe in (probes[len(CHUNKS) - 1], probes[-1]):
        probe()  # the two that touch all pages: nobody has before
    taken: list[float] = []
    while len(taken) < _ROUNDS * len(probes):
        if not _told(transport, [clock() - start < _SECONDS])[0]:
            break
        begin = clock()
        probes[len(taken) % len(probes)]()
        taken.append(clock() - begin)
    whole = len(taken) // len(probes) * len(probes)
    everyone = transport.gather(np.array(taken[:whole]).tobytes())
    rows = [np.frombuffer(message) for message in everyone]
    return np.stack(rows).reshape(transport.size, -1, len(probes))


def _choose(
    transport: Transport, connect: Callable[[], Transport], wanted: bool, clock: Clock
) -> Tuning:
    default = Tuning(Settings.fusion_threshold, transport.chunk)
    machine = tuning_cache.machine(transport.size)
    proposed: Tuning | None = default
    if wanted and transport.rank == 0:
        proposed = _settled.get(transport.size) or _valid(tuning_cache.load(machine))
    # Rank 0's; no cap at all stands for: measure.
    told = _told(transport, [proposed.bucket_cap, proposed.chunk] if proposed else [0, 0])
    if told[0]:
        settled, how = Tuning(*told), "as measured before" if wanted else "not tuned"
    else:
        start = clock()
        chosen = _measured(connect, default, clock)
        if chosen and transport.rank == 0:
            tuning_cache.store(machine, asdict(chosen))
        settled, how = chosen or default, "measured" if chosen else "too little time to measure"
        how += f", {clock() - start:.2f} s"
    if wanted:
        _settled[transport.size] = settled
    _report(transport, settled, how)
    return settled


def _measured(connect: Callable[[], Transport], default: Tuning, clock: Clock) -> Tuning | None:
    transport = connect()
    try:
        with _leaving(transport):
            # Memory may have run short: then that is not what the job will run on.
            return choose(measure(transport, clock), default) if transport.chunk else None
    finally:
        transport.close()


def _probes(transport: Transport) -> list[Callable[[], None]]:
    """What is timed: one for each size that is tried."""
    array = np.zeros(_ARRAY_BYTES // 4, np.float32)
    model = transport.empty(_MODEL_BYTES // 4, np.dtype(np.float32))
    model[...] = 0
    return [
        *(functools.partial(_exchange_array, transport, array, chunk) for chunk in CHUNKS),
        *(functools.partial(_exchange_buckets, transport, model, cap) for cap in CAPS),
    ]


def _exchange_array(transport: Transport, array: Any, chunk: int) -> None:
    transport.chunk = chunk
    transport.allreduce(array, array, ReduceOp.SUM, Scaling())


def _exchange_buckets(transport: Transport, model: Any, cap: int) -> None:
    size = cap // model.itemsize
    for start in range(0, model.size, size):
        _told(transport, [0])  # before each bucket ranks meet
        bucket = model[start : start + size]
        transport.allreduce(bucket, bucket, ReduceOp.SUM, Scaling())


def _told(transport: Transport, numbers: list[Any]) -> list[int]:
    """Rank 0's numbers."""
    array = np.array(numbers, np.int64)
    transport.broadcast(array.view(np.uint8), 0)
    told: list[int] = array.tolist()
    return told


def _valid(stored: Any) -> Tuning | None:
    """What a file says, if it is what this version could have written."""
    if not isinstance(stored, Mapping):
        return None
    cap, chunk = stored.get("bucket_cap"), stored.get("chunk")
    return Tuning(cap, chunk) if cap in CAPS and chunk in CHUNKS else None


def _report(transport: Transport, tuning: Tuning, how: str) -> None:
    if transport.rank == 0:
        _log.info(
            "buckets of %d bytes (HVDLITE_FUSION_THRESHOLD goes before it), chunks of %s bytes: %s",
            tuning.bucket_cap,
            tuning.chunk,
            how,
        )


@contextlib.contextmanager
def _leaving(transport: Transport) -> Iterator[None]:
    """Tell the other ranks, who would wait, when this one fails."""
    try:
        yield
    except BaseException:
        transport.leave()
        raise
