"""Measure the time and memory that a strategy needs for a bucket of 25 MiB."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.compression import Bucket, Parameter, Reduction, Strategy, exchange_bucket
from hvdlite.tools.bench import measurement
from hvdlite.tools.bench.measurement import Contender, Ranks, interleave, timed
from hvdlite.transport import Transport
from hvdlite.transport.loopback import Loopback
from tests.benchmarks.strategies import DENSE, Entry

PARAMETERS = [Parameter(f"weight {n}", (512, 512), np.dtype(np.float32)) for n in range(25)]
_DEVIATION = 1e-3  # of gradients, as they are in training; thresholds depend on it
_PAYLOAD = 1024  # bytes; whatever is smaller is agreement


class _Watch(Loopback):
    """Transport of one rank that records the arrival of the first payload."""

    first = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.recycles = False
        self._kept: dict[tuple[int, np.dtype[Any]], Any] = {}

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return reused memory, as transports do: the system takes long to clear new pages."""
        if not self.recycles:
            return np.empty(size, dtype)
        if (size, dtype) not in self._kept:
            self._kept[size, dtype] = np.empty(size, dtype)
        return self._kept[size, dtype]

    @property
    def kept(self) -> int:
        """Return the size of that memory in bytes."""
        return sum(array.nbytes for array in self._kept.values())

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        self._note(send.nbytes)
        super().allreduce(send, result, op, scaling)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        self._note(sum(piece.nbytes for piece in pieces))
        super().alltoall(pieces, result)

    def _note(self, nbytes: int) -> None:
        if nbytes >= _PAYLOAD and not self.first:
            self.first = time.perf_counter()


class _Exchange:
    """A bucket of normally distributed gradients, and its exchange."""

    def __init__(self, strategy: Strategy, transport: Transport) -> None:
        self._strategy = strategy.choose(PARAMETERS[0])
        self._transport = transport
        self.bucket = Bucket(PARAMETERS, Reduction(), transport.empty)
        draw = np.random.default_rng(transport.rank)
        draw.standard_normal(out=self.bucket.send, dtype=np.float32)
        self.bucket.send *= np.float32(_DEVIATION)

    def __call__(self) -> None:
        exchange_bucket(self._strategy, self.bucket, self._transport)
        self.bucket.count += 1


def on_one_core(entry: Entry, rounds: int) -> dict[str, Any]:
    """Measure an exchange in this process alone: all that a rank does except for sending.

    Returns:
        Seconds of a memcpy of the bucket, until the first bytes could be sent (``encode``), and of
        everything (``alone``), each as `measurement.summary`; the ratio of ``encode`` to the
        memcpy, likewise; and ``peak``, the temporary memory in buckets.
    """
    watch = _Watch()
    exchange = _Exchange(entry.strategy, watch)
    watch.recycles = True  # from now on; a bucket has two arrays of one size
    exchange()  # after it, the strategy has all that it keeps
    copy = _memcpy(exchange.bucket)
    samples = np.empty((3, rounds))
    for column in samples.T:
        watch.first = 0.0
        start = time.perf_counter()
        exchange()
        stop = time.perf_counter()
        # A strategy may find nothing to send, and then has looked for it until the end.
        column[:] = timed(copy), (watch.first or stop) - start, stop - start
    tracemalloc.start()
    try:
        exchange()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    seconds = dict(zip(("memcpy", "encode", "alone"), samples, strict=True))
    return {
        **{name: measurement.summary(values) for name, values in seconds.items()},
        "encode / memcpy": measurement.summary(seconds["encode"] / seconds["memcpy"]),
        "peak": (peak + watch.kept) / exchange.bucket.send.nbytes,
    }


def on_all_ranks(
    comm: Any, transport: Transport, entry: Entry, rounds: int
) -> dict[str, dict[str, float]]:
    """Measure whole exchanges, dense ones and copies in turns; collective.

    Returns:
        Seconds by contender, as `measurement.summary`.
    """
    exchange = _Exchange(entry.strategy, transport)
    contenders = [
        Contender("exchange", exchange),
        Contender("dense", _Exchange(DENSE.strategy, transport)),
        Contender("memcpy", _memcpy(exchange.bucket)),
    ]
    for contender in contenders:
        contender.call()
    Ranks(comm).meet()
    found = interleave(Ranks(comm), contenders, rounds=rounds, seconds=60.0, at_least=1)
    return {name: measurement.summary(seconds) for name, seconds in found.items()}


def _memcpy(bucket: Bucket) -> Callable[[], object]:
    source, target = np.ones_like(bucket.send), np.zeros_like(bucket.send)
    return lambda: np.copyto(target, source)
