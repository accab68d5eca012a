"""PyTorch's own tests of torch.distributed, on any backend, and on ranks that the harness starts.

python -m tests.torch.distributed_suite --backend gloo
python -m tests.torch.distributed_suite --backend gloo --substitute
python -m tests.torch.distributed_suite --backend hvdlite --gate mpi --ranks 4 test_all_to_all
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import DEFAULT_TIMEOUT
from tests.harness.job import Job, JobError
from tests.harness.messages import Report, Request

SECONDS = 60.0
"""A test that takes longer has failed; its ranks are ended, and others run the next."""


class Result(NamedTuple):
    """A test has passed, skipped or failed; the text has the reason, or what the ranks report."""

    outcome: str
    text: str
    seconds: float


def run(
    backend: str,
    size: int = 3,
    chosen: Callable[[str], bool] = bool,
    *,
    gate: str = "gloo",
    substitute: bool = False,
    timeout: float = SECONDS,
) -> Iterator[tuple[str, Result]]:
    """Run tests one after another, each in a world of its own.

    Args:
        backend: Of the tests' groups.
        size: The number of ranks.
        chosen: Whether to run a test of this name.
        gate: The backend that tests see when they choose whether to run at all.
        substitute: Have hvdlite stand in for gloo and MPI.
        timeout: Seconds for a test.
    """
    suite = {"backend": backend, "substitute": substitute}
    with tempfile.TemporaryDirectory(prefix="suite-") as folder, Ranks(size, gate, folder) as ranks:
        names = ranks.start(suite)
        for name in filter(chosen, names):
            if (reason := names[name]) is not None:
                yield name, Result("skipped", reason, 0)
                continue
            if not ranks.job.alive:
                ranks.start(suite)
            for each in ("barrier", "test_dir"):
                Path(folder, name, each).mkdir(parents=True)
            start = time.monotonic()
            reports = ranks.call(timeout, "run_one", name=name, folder=f"{folder}/{name}", **suite)
            yield name, _result(reports, time.monotonic() - start)


class Ranks:
    """Ranks for test after test, until one fails."""

    def __init__(self, size: int, gate: str, folder: str) -> None:
        self._size, self._folder = size, folder
        self._env = {
            "BACKEND": gate,
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "INIT_METHOD": f"file://{folder}/init",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        self.job: Job

    def start(self, suite: dict[str, Any]) -> dict[str, str | None]:
        """Start ranks, have them import the suite, and return the tests' names."""
        self.job = Job(self._size, self._env)
        path = f"{self._folder}/names"
        imported = _result(self.call(DEFAULT_TIMEOUT, "write_names", path=path, **suite), 0)
        if imported.outcome != "passed":
            raise JobError(imported.text)
        names: dict[str, str | None] = json.loads(Path(path).read_text())
        return names

    def call(self, timeout: float, function: str, **arguments: Any) -> list[Report]:
        """Call a function of this module on all ranks."""
        pickled, path = pickle.dumps(arguments), tuple(sys.path)
        return self.job.run(Request(__spec__.name, function, pickled, (), {}, (), path), timeout)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.kill()


def _result(reports: list[Report], seconds: float) -> Result:
    if {report.outcome for report in reports} in ({"passed"}, {"skipped"}):
        return Result(reports[0].outcome, reports[0].text, seconds)
    reports = sorted(reports, key=lambda report: report.outcome != "failed")
    said = [f"rank {each.rank} {each.outcome}: {each.text}\n{each.output}" for each in reports]
    return Result("failed", "\n".join(said), seconds)


# The rest runs on the ranks.


@functools.cache
def _suite(backend: str, substitute: bool) -> Any:
    from torch.testing._internal.distributed import distributed_test

    if backend == "hvdlite" or substitute:
        import hvdlite.torch.distributed as ours

        if substitute:
            ours.substitute()
            # torch's own groups alone appear in its profiler.
            distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
            distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    distributed_test.BACKEND = backend  # The tests' decorators have seen the gate.

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        barrier = distributed_test.Barrier

        def _barrier(self, wait_for: int | None = None, timeout: float = SECONDS) -> None:
            self.barrier.sync(wait_for, SECONDS)  # The suite's 10 s are short on a busy machine.

    return Suite


def write_names(path: str, backend: str, substitute: bool) -> None:
    """Write the tests' names, each with the reason why it is skipped here, or None."""
    tests = vars(_suite(backend, substitute).__bases__[1]).items()
    names = {
        name: getattr(test, "__unittest_skip_why__", None)
        for name, test in tests
        if name.startswith("test_")
    }
    if _rank() == 0:
        Path(path).write_text(json.dumps(names))


def run_one(name: str, folder: str, backend: str, substitute: bool) -> None:
    """Run a test as in the suite's own processes, which end with it."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    suite = _suite(backend, substitute)
    suite.barrier.barrier_id = 0
    os.environ["TEMP_DIR"] = folder
    os.environ["BACKEND"] = "mpi"  # Or else tests of groups of two ranks want a world of eight.
    parent, child = multiprocessing.Pipe()
    try:
        suite._run(_rank(), name, f"{folder}/store", child)
    except SystemExit as end:
        if end.code == suite.TEST_ERROR_EXIT_CODE:
            text = parent.recv().rstrip()
            pytest.fail(f"{text.splitlines()[-1]}\n{text}", pytrace=False)
        skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if end.code in skips:
            if dist.is_initialized():
                dist.destroy_process_group()
            pytest.skip(skips[end.code])
        if end.code:
            raise


def _rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])


def main() -> None:
    """Print the outcome of each test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hvdlite")
    parser.add_argument("--substitute", action="store_true", help="hvdlite stands in for it")
    parser.add_argument("--gate", help="the backend whose tests run; by default gloo for hvdlite")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=SECONDS, help="seconds for a test")
    parser.add_argument("--verbose", action="store_true", help="print all that failed ranks say")
    parser.add_argument("names", nargs="*", help="the beginnings of tests' names; all by default")
    options = parser.parse_args()
    gate = options.gate or ("gloo" if options.backend == "hvdlite" else options.backend)
    counts: collections.Counter[str] = collections.Counter()
    for name, result in run(
        options.backend,
        options.ranks,
        lambda name: name.startswith(tuple(options.names or ["test"])),
        gate=gate,
        substitute=options.substitute,
        timeout=options.timeout,
    ):
        counts[result.outcome] += 1
        text = result.text if options.verbose else "".join(result.text.splitlines()[:1])
        print(f"{result.outcome} {result.seconds:5.1f} s  {name}  {text}".rstrip(), flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
