"""Count what a step sends as the number of ranks grows; counts need no quiet machine.

Each rank exchanges 16 MiB of gradients in buckets of 4 MiB. Open MPI's own monitoring counts the
messages and bytes that each rank sends, also those of its collectives; a generation is one meeting
of a node's ranks in shared memory. A step is the difference between two jobs. Nodes are simulated
(``HVDLITE_FORCE_LOCAL_SIZE``). The best known allreduce sends 2 (n - 1) / n of the bytes, of a node
where ranks share one.

With ``--rate`` sums are timed instead, on hosts of one rank: network namespaces of this machine,
joined by links of that many bits per second. Latency and bandwidth come from the fewest hosts; the
formula of docs/guides/scaling.md predicts the rest.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.compression import Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange
from tests.benchmarks.slow_link import run_on_hosts
from tests.harness import mpirun

_BUCKETS, _NBYTES = 4, 4 * 2**20
_FIRST, _STEPS = 3, 4
_SUMS = [2**12, 2**18, 2**20, 2**22]
_SECONDS = 600.0
_SENT = re.compile(r"^[IE]\t\d+\t\d+\t(\d+) bytes\t(\d+) msgs", re.MULTILINE)


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--local", type=int, nargs="+", default=[0, 4, 1], help="0: all on a node")
    parser.add_argument("--rate", type=float, help="bits per second of simulated links")
    options = parser.parse_args()
    if options.rate:
        _compare([size for size in options.ranks if size <= 8], options.rate)
        return
    print("ranks  of a node  generations  messages  MiB sent  best")
    for local in options.local:
        for size in options.ranks:
            if local < size:
                _print(size, local or size)


def _print(size: int, local: int) -> None:
    """Print the mean over the ranks."""
    few, many = (_count(size, local, steps) for steps in (_FIRST, _FIRST + _STEPS))
    generations, messages, nbytes = (many - few) / _STEPS
    nodes = size // local
    best = 2 * (nodes - 1) / nodes * _BUCKETS * _NBYTES / local
    print(
        f"{size:5}{local:11}{generations:13.1f}{messages:10.1f}{nbytes / 2**20:10.2f}"
        f"{best / 2**20:6.2f}",
        flush=True,
    )


def _count(size: int, local: int, steps: int) -> np.ndarray:
    """Return generations, messages and bytes of a job, each for one rank."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {
            "HVDLITE_FORCE_LOCAL_SIZE": str(local),
            "HVDLITE_OVERLAP": "0",  # all buckets in one round; else timing decides
            "HVDLITE_FUSION_THRESHOLD": str(_NBYTES),
            "HVDLITE_FIRST_BUCKET_SIZE": str(_NBYTES),
            "OMPI_MCA_pml_monitoring_enable": "2",
            "OMPI_MCA_pml_monitoring_enable_output": "3",
            "OMPI_MCA_pml_monitoring_filename": f"{folder}/sent",
        }
        result = subprocess.run(
            mpirun.command(size, "-m", "tests.benchmarks.growth", "--rank", str(steps)),
            env=mpirun.environment(extra),
            cwd=mpirun.ROOT,
            stdout=subprocess.PIPE,
            timeout=_SECONDS,
        )
        if result.returncode:
            sys.exit(f"{size} ranks, {local} of a node: mpirun ended with {result.returncode}")
        rows = [_SENT.findall(path.read_text()) for path in Path(folder).glob("sent*")]
    sent = np.array([row for rank in rows for row in rank], float).reshape(-1, 2)
    nbytes, messages = sent.sum(axis=0) / size
    return np.array([float(result.stdout), messages, nbytes])


def _exchange(steps: int) -> None:
    """Exchange gradients as one rank, and print the generations on rank 0."""
    hvd.init()
    engine = runtime.engine()
    parameters = [
        Parameter(f"{number}", (_NBYTES // 4,), np.dtype(np.float32)) for number in range(_BUCKETS)
    ]
    exchange = GradientExchange(engine, "model", parameters, hvd.Compression.none, Reduction())
    for step in range(steps):
        exchange.begin()
        for number in range(_BUCKETS):
            exchange.buckets.slot(number)[...] = np.full(_NBYTES // 4, hvd.rank() + step)
            exchange.mark(number)
        exchange.finish()
        expected = step + (hvd.size() - 1) / 2
        assert all((exchange.buckets.result_slot(n) == expected).all() for n in range(_BUCKETS))
    if hvd.rank() == 0:
        node = getattr(engine.gradients.transport, "_node", engine.gradients.transport)
        barrier = getattr(node, "_barrier", None)
        print(barrier.last if barrier is not None else 0)
    hvd.shutdown()


def _compare(sizes: list[int], rate: float) -> None:
    """Print the times of sums on hosts, and what the formula predicts."""
    print("hosts      MiB  measured  predicted")
    latency = bandwidth = 0.0
    for size in sizes:
        found = run_on_hosts(size, "tests.benchmarks.growth:timed", {}, rate, _SECONDS).result
        rounds, share = 4 * math.log2(size), 2 * (size - 1) / size
        latency = latency or found[0] / rounds
        bandwidth = bandwidth or share * _SUMS[-1] / (found[-1] - found[0])
        for nbytes, seconds in zip(_SUMS, found, strict=True):
            predicted = rounds * latency + share * nbytes / bandwidth
            print(f"{size:5}{nbytes / 2**20:9.3f}{seconds:9.4f}s{predicted:10.4f}s", flush=True)
    print(f"latency {latency * 1e6:.0f} us, {bandwidth * 8e-6:.1f} Mbit/s")


def timed(comm: Any) -> list[float]:
    """Return the median seconds of sums of so many bytes, on the slowest rank."""
    hvd.init(comm)
    medians = []
    for nbytes in _SUMS:
        array = np.ones(nbytes // 4, np.float32)
        seconds = []
        for _ in range(12):
            comm.Barrier()
            start = time.perf_counter()
            hvd.allreduce(array, op=hvd.Average, name=f"{nbytes}", out=array)
            seconds.append(max(comm.allgather(time.perf_counter() - start)))
        medians.append(float(np.median(seconds[2:])))
    hvd.shutdown()
    return medians


if __name__ == "__main__":
    _exchange(int(sys.argv[2])) if sys.argv[1:2] == ["--rank"] else main()
