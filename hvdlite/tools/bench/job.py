"""The job of a benchmark: a function on every rank, started as `hvdlite.run` starts it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hvdlite.errors import StartError
from hvdlite.launch import function as launch
from hvdlite.launch.hosts import choose_hosts, on_this_host
from hvdlite.launch.worker import RemoteTraceback
from hvdlite.tools.bench.measurement import watch
from hvdlite.tools.bench.report import count_text

_PACKAGES = ("hvdlite", "numpy", "mpi4py", "torch", "tensorflow", "keras")
_QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
# What keeps a core busy, until the rank that has started it ends.
_COMPUTE = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10**5))"


class Outcome(NamedTuple):
    """The result of a function on rank 0, the versions of the software, and how many hosts."""

    result: Any
    versions: dict[str, str]
    hosts: int


def run(
    size: int,
    function: str,
    arguments: Mapping[str, Any],
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    busy: int = 0,
) -> Outcome:
    """Call a function on every rank of a job.

    Args:
        function: as ``module:name``, imported on the ranks only; called with ``MPI.COMM_WORLD``
            and the arguments.
        hosts, hostfile: as for ``hvdliterun``.
        busy: processes that compute on each host meanwhile, as those that load data do.

    Raises:
        StartError: the hosts are wrong, or the job failed (code 1); one line that names the rank
            and the reason. Its cause has the traceback on that rank.
    """
    variables = dict(_QUIET)
    if on_this_host(choose_hosts(hosts, hostfile, size), os.environ):
        # A host need not be able to look up its own name.
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        results = launch.run(
            _on_rank,
            (size, function, dict(arguments), busy),
            num_proc=size,
            hosts=hosts,
            hostfile=hostfile,
            env=variables,
        )
    except StartError:
        raise
    except Exception as error:  # whatever a contender raises on a rank
        raise StartError(
            f"the job of {count_text(size, 'rank')} failed: {describe(error)}", 1
        ) from error
    return Outcome(*results[0])


def describe(error: Exception) -> str:
    """Say in one line what has failed, and on which rank."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    cause = error.__cause__
    if not isinstance(cause, RemoteTraceback) or line.startswith("rank "):
        return line.removesuffix("; mpirun printed:")
    kind = "" if isinstance(error, ContenderError) else f"{type(error).__name__}: "
    return f"rank {cause.rank}: {kind}{line}"


class ContenderError(RuntimeError):
    """A contender that failed; its text names it and says how to go on without it."""


@contextlib.contextmanager
def naming(contender: str) -> Iterator[None]:
    """Have whatever goes wrong in a context name the contender."""
    try:
        yield
    except Exception as error:  # other libraries raise what they like
        line = str(error).strip().partition("\n")[0]
        raise ContenderError(
            f"{contender} failed: {type(error).__name__}: {line}; choose others by --contenders"
        ) from error


def say(comm: Any, text: str) -> None:
    """Print a line of progress, on rank 0 only; all ranks call it."""
    watch()
    if comm.rank == 0:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def computing(node: Any, count: int) -> Iterator[None]:
    """Have processes compute on a node in a context."""
    command = [sys.executable, "-I", "-S", "-c", _COMPUTE, str(os.getpid())]
    own = [subprocess.Popen(command) for _ in range(count if node.rank == 0 else 0)]
    node.Barrier()
    try:
        yield
    finally:
        for process in own:
            process.kill()
            process.wait()


def _on_rank(size: int, function: str, arguments: dict[str, Any], busy: int) -> Outcome | None:
    from mpi4py import MPI

    watch()
    comm = MPI.COMM_WORLD
    if comm.size != size:
        raise RuntimeError(f"MPI has {comm.size} ranks, expected {size}; `hvdlite check` says why")
    measure = pkgutil.resolve_name(function)
    with computing(comm.Split_type(MPI.COMM_TYPE_SHARED), busy):
        result = measure(comm, **arguments)
    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    faulthandler.cancel_dump_traceback_later()
    return Outcome(result, _versions(MPI), hosts) if comm.rank == 0 else None


def _versions(mpi: Any) -> dict[str, str]:
    library = mpi.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0")
    versions = {"python": sys.version.split()[0], "MPI": library}
    for package in _PACKAGES:
        module = sys.modules.get(package)
        if module is not None:
            versions[package] = getattr(module, "__version__", "unknown")
    return versions
