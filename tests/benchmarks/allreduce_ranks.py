"""Ranks of the allreduce benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import hvdlite.torch as hvd
from hvdlite import runtime
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.gradients import GradientExchange
from tests.benchmarks import libraries, statistics
from tests.benchmarks.job import say
from tests.benchmarks.measurement import Contender, Limit, interleave, meet
from tests.benchmarks.report import size_text

_FLOAT = 4
_SMALL = 2**20
_CALLS_IF_SMALL = 20
_BURST_TENSORS, _BURST_BYTES = 400, 16 * 1024
# In the tables' direction: how much slower the first is.
_RATIOS = (
    ("gloo", "hvdlite"),
    ("mpi", "hvdlite"),
    ("horovod", "hvdlite"),
    ("hvdlite", "memcpy"),
    ("hvdlite bucket", "memcpy"),
)


@dataclass(frozen=True)
class Sum(Contender):
    """A contender that sums its inputs over all ranks.

    Attributes:
        outputs: the sums, asked for after each call: a bucket's may lie elsewhere every time.
    """

    outputs: Callable[[], Sequence[np.ndarray[Any, Any]]] = tuple


def measure(
    comm: MPI.Comm, sizes: Sequence[int], burst: bool, limit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time sums of float32 in place; collective.

    Args:
        comm: all ranks.
        sizes: bytes of the tensors.
        burst: whether to time many small ones at once, too.
        limit: arguments of `Limit`.

    Returns:
        A record for each size, and one for the burst.
    """
    torch.set_num_threads(1)
    hvd.init(comm)
    records = []
    with libraries.gloo(comm) as gloo:
        horovod = libraries.horovod("torch")
        for nbytes in sizes:
            say(comm, f"{size_text(nbytes)} on {comm.size} ranks")
            calls = _CALLS_IF_SMALL if nbytes <= _SMALL else 1
            contenders = _single(comm, gloo, horovod, nbytes)
            times = _measure(comm, contenders, Limit(**limit), calls)
            records.append({"case": "allreduce", "bytes": nbytes, "calls_in_a_row": calls, **times})
        if burst:
            say(comm, f"{_BURST_TENSORS} x {size_text(_BURST_BYTES)} on {comm.size} ranks")
            contenders = _burst(comm, gloo, horovod)
            times = _measure(comm, contenders, Limit(**limit), 1)
            records.append(
                {"case": "burst", "bytes": _BURST_BYTES, "tensors": _BURST_TENSORS, **times}
            )
    hvd.shutdown()
    return records


def _measure(
    comm: MPI.Comm, contenders: Sequence[Contender], limit: Limit, calls: int
) -> dict[str, Any]:
    for contender in contenders:
        _check(comm, contender)
    times = interleave(comm, contenders, limit, calls)
    return {
        "ranks": comm.size,
        "rounds": len(times["hvdlite"]),
        "seconds": {name: statistics.summary(samples) for name, samples in times.items()},
        "ratios": {
            f"{over} / {under}": statistics.ratio(times[over], times[under])
            for over, under in _RATIOS
            if over in times and under in times
        },
    }


def _check(comm: MPI.Comm, contender: Contender) -> None:
    """Warm a contender up and check that it sums."""
    expected = comm.size * (comm.size + 1) / 2
    for _ in range(2):
        contender.prepare(comm.rank + 1)
        meet(comm)
        contender.call()
        for output in contender.outputs() if isinstance(contender, Sum) else ():
            if not (output == expected).all():
                raise RuntimeError(
                    f"{contender.name} on rank {comm.rank}: a sum of {output.nbytes} bytes has "
                    f"{output[output != expected][0]}, expected {expected}; its time would mean "
                    "nothing"
                )


def _single(comm: MPI.Comm, gloo: Any, horovod: Any, nbytes: int) -> list[Contender]:
    """Return the contenders that sum one tensor, all but the bucket in the same memory."""
    tensor = torch.empty(nbytes // _FLOAT)
    array = tensor.numpy()
    name = f"benchmark.{nbytes}"
    calls = {
        "hvdlite": lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum),
        "mpi": lambda: comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM),
        "gloo": lambda: gloo.all_reduce(tensor),
    }
    if horovod is not None:
        calls["horovod"] = lambda: horovod.allreduce_(tensor, name=name, op=horovod.Sum)
    sums = [Sum(contender, call, [array], lambda: [array]) for contender, call in calls.items()]
    target = np.empty_like(array)
    memcpy = Contender("memcpy", lambda: np.copyto(target, array), [array])
    return [sums[0], _bucket(nbytes), *sums[1:], memcpy]


def _bucket(nbytes: int) -> Contender:
    """Return the contender whose gradient is in its bucket already."""
    parameter = Parameter("gradient", (nbytes // _FLOAT,), np.dtype(np.float32))
    exchange = GradientExchange(
        runtime.engine(),
        f"benchmark {nbytes}",
        [parameter],
        Compression.none,
        Reduction(hvd.Sum),
    )

    def call() -> None:
        exchange.mark(0)
        exchange.finish()

    return Sum(
        "hvdlite bucket",
        call,
        [exchange.buckets.slot(0)],
        lambda: [exchange.buckets.result_slot(0)],
    )


def _burst(comm: MPI.Comm, gloo: Any, horovod: Any) -> list[Contender]:
    """Return the contenders that start the sums of many tensors, and then wait for all."""
    tensors = [torch.empty(_BURST_BYTES // _FLOAT) for _ in range(_BURST_TENSORS)]
    arrays = [tensor.numpy() for tensor in tensors]
    targets = [np.empty_like(array) for array in arrays]

    def start_mpi() -> None:
        MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM) for array in arrays])

    def start_gloo() -> None:
        for work in [gloo.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def copy() -> None:
        for target, array in zip(targets, arrays, strict=True):
            np.copyto(target, array)

    calls = {"hvdlite": _start_all(hvd, tensors), "mpi": start_mpi, "gloo": start_gloo}
    if horovod is not None:
        calls["horovod"] = _start_all(horovod, tensors)
    sums = [Sum(name, call, arrays, lambda: arrays) for name, call in calls.items()]
    return [*sums, Contender("memcpy", copy, arrays)]


def _start_all(library: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Run the burst through Horovod's interface, which is also hvdlite's."""
    names = [f"burst.{number}" for number in range(len(tensors))]

    def call() -> None:
        handles = [
            library.allreduce_async_(tensor, name=name, op=library.Sum)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        for handle in handles:
            library.synchronize(handle)

    return call
