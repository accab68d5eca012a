"""Run a function on every rank under mpirun, and return rank 0's result."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.harness import mpirun

SECONDS = 1800.0
"""After which a job is ended."""

_PACKAGES = ("numpy", "torch", "tensorflow", "keras", "horovod", "mpi4py", "hvdlite")


Launch = Callable[[int, list[str]], int]


def run(
    size: int, function: str, arguments: dict[str, Any], launch: Launch | None = None
) -> tuple[Any, dict[str, str]]:
    """Call a function on every rank of a job.

    Args:
        size: ranks.
        function: as ``module:name``; called with ``MPI.COMM_WORLD`` and the arguments.
        arguments: what JSON can carry.
        launch: runs this Python with some arguments on so many ranks, and returns the exit code;
            None: on this machine.

    Returns:
        What it returned on rank 0, through JSON, and the versions of what it used.

    Raises:
        RuntimeError: the job failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result = Path(folder, "result.json")
        ranks = ["-m", "tests.benchmarks.job", function, json.dumps(arguments), str(result)]
        code = (launch or _launch)(size, ranks)
        if code:
            raise RuntimeError(f"{function} on {size} ranks ended with exit code {code}; see above")
        found = json.loads(result.read_text())
    return found["result"], found["versions"]


def _launch(size: int, ranks: list[str]) -> int:
    return _run(mpirun.command(size, *ranks))


def _run(command: list[str]) -> int:
    """Run mpirun, and end it and its ranks whatever happens here."""
    # All ranks share a node, which need not be able to look up its own name.
    extra = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    # Whoever ends this process by SIGTERM means the job, too.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen(
        command, env=mpirun.environment(extra), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command} took more than {SECONDS:g} s") from None
    finally:
        mpirun.end(process)
        signal.signal(signal.SIGTERM, previous)


def say(comm: Any, text: str) -> None:
    """Print a line of progress, on rank 0 only."""
    if comm.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _main(function: str, arguments: str, path: str) -> None:
    """Run the function on this rank."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(comm, **json.loads(arguments))
        if comm.rank == 0:
            Path(path).write_text(json.dumps({"result": result, "versions": _versions(MPI)}))
    except BaseException:
        sys.stderr.write(f"rank {comm.rank}:\n{traceback.format_exc()}")
        sys.stderr.flush()
        comm.Abort(1)  # The others may be waiting for this rank.


def _versions(mpi: Any) -> dict[str, str]:
    library = mpi.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0")
    versions = {"python": sys.version.split()[0], "MPI": library}
    for package in _PACKAGES:
        module = sys.modules.get(package)
        if module is not None:
            versions[package] = str(getattr(module, "__version__", None) or _installed(package))
    return versions


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    _main(*sys.argv[1:])
