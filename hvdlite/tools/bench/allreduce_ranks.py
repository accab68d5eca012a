"""Ranks of the allreduce benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.tools.bench.job import naming, say
from hvdlite.tools.bench.measurement import Contender, Ranks, compare, interleave
from hvdlite.tools.bench.report import count_text, size_text

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

_DTYPE = np.dtype(np.float32)
_ALIGNMENT = 64
_SMALL, _CALLS_IF_SMALL = 2**20, 20
_BURST_TENSORS, _BURST_BYTES = 400, 16 * 1024


@dataclass(frozen=True)
class Library:
    """A library that sums tensors, which view arrays' memory, over all ranks in place."""

    sum: Callable[[Any, str], object]
    start: Callable[[Any, str], Any]  # the same, and return a handle
    wait: Callable[[Sequence[Any]], object] = lambda handles: [each.wait() for each in handles]
    view: Callable[[Array], Any] = np.asarray

    def call(self, arrays: Sequence[Array], name: str) -> Call:
        """Return the call that sums an array, or starts the sums of many, and waits for them."""
        if len(arrays) == 1:
            return partial(self.sum, self.view(arrays[0]), name)
        tensors = {f"{name}.{at}": self.view(array) for at, array in enumerate(arrays)}
        return lambda: self.wait([self.start(tensor, each) for each, tensor in tensors.items()])


def measure(
    comm: MPI.Comm,
    framework: str,
    contenders: Sequence[str],
    sizes: Sequence[int],
    burst: bool,
    limit: dict[str, Any],
) -> list[dict[str, Any]]:
    """Time sums of float32 in place, by bytes, and a burst of many small ones; collective."""
    cases = [(nbytes, 1) for nbytes in sizes]
    if burst:
        cases.append((_BURST_BYTES, _BURST_TENSORS))
    hvd.init(comm)
    frameworks: AbstractContextManager[dict[str, Library]] = nullcontext({})
    if framework != "numpy":
        adapter = importlib.import_module(f"hvdlite.{framework}.benchmark")
        frameworks = adapter.libraries(comm, contenders)
    with frameworks as libraries:
        libraries = {**_libraries(comm), **libraries}
        records = [
            _measure(comm, contenders, libraries, nbytes, tensors, limit)
            for nbytes, tensors in cases
        ]
    hvd.shutdown()
    return records


def _measure(
    comm: MPI.Comm,
    names: Sequence[str],
    libraries: Mapping[str, Library],
    nbytes: int,
    tensors: int,
    limit: dict[str, Any],
) -> dict[str, Any]:
    case = f"{tensors} x {size_text(nbytes)}" if tensors > 1 else size_text(nbytes)
    say(comm, f"{case} on {count_text(comm.size, 'rank')}")
    arrays = [_empty(nbytes) for _ in range(tensors)]
    contenders = []
    for name in names:
        if name == "bucket":
            contenders += [_bucket(nbytes)] if tensors == 1 else []
        elif name == "memcpy":
            contenders.append(Contender(name, _copying(arrays), arrays))
        else:
            call = libraries[name].call(arrays, f"bench.{nbytes}")
            contenders.append(Contender(name, call, arrays, lambda: arrays))
    for contender in contenders:
        with naming(contender.name):
            _check(comm, contender)
    calls = _CALLS_IF_SMALL if tensors == 1 and nbytes <= _SMALL else 1
    times = interleave(Ranks(comm), contenders, calls, **limit)
    return {
        "case": "allreduce" if tensors == 1 else "burst",
        "ranks": comm.size,
        "bytes": nbytes,
        "tensors": tensors,
        "dtype": _DTYPE.name,
        "calls_in_a_row": calls,
        **compare(times),
    }


def _check(comm: MPI.Comm, contender: Contender) -> None:
    """Warm a contender up and check that it sums."""
    expected = comm.size * (comm.size + 1) / 2
    for _ in range(2):
        contender.prepare(comm.rank + 1)
        Ranks(comm).meet()
        contender.call()
        for output in contender.outputs():
            if not (output == expected).all():
                raise RuntimeError(
                    f"a sum of {output.nbytes} bytes has {output[output != expected][0]}, "
                    f"expected {expected}; its time would mean nothing"
                )


def _empty(nbytes: int) -> Array:
    """Return an array that begins a cache line, as frameworks' memory does."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(_DTYPE)


# The contenders


def _libraries(comm: MPI.Comm) -> dict[str, Library]:
    """Return the libraries that sum arrays of numpy."""
    return {
        "hvdlite": Library(
            lambda array, name: hvd.allreduce(array, name=name, op=hvd.Sum, out=array),
            lambda array, name: hvd.allreduce_async(array, name=name, op=hvd.Sum, out=array),
        ),
        "mpi": Library(
            lambda array, name: comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM),
            lambda array, name: comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM),
            MPI.Request.Waitall,
        ),
    }


def _bucket(nbytes: int) -> Contender:
    """Return the contender whose gradient is in its bucket already."""
    parameter = Parameter("gradient", (nbytes // _DTYPE.itemsize,), _DTYPE)
    exchange = GradientExchange(
        runtime.engine(), f"bench {nbytes}", [parameter], Compression.none, Reduction(hvd.Sum)
    )

    def call() -> None:
        exchange.mark(0)
        exchange.finish()

    slot, result = exchange.buckets.slot(0), exchange.buckets.result_slot
    return Contender("bucket", call, [slot], lambda: [result(0)])


def _copying(arrays: Sequence[Array]) -> Call:
    copies = [partial(np.copyto, np.empty_like(array), array) for array in arrays]
    return lambda: [copy() for copy in copies]
