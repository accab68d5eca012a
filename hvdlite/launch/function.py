"""`run` and `spawn`: a Python function on N ranks, from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdlite.errors import HorovodInternalError
from hvdlite.launch import rank, worker
from hvdlite.launch.hosts import choose_hosts, own_addresses
from hvdlite.launch.job import follow
from hvdlite.launch.options import from_keywords, make_job, report_ignored, variables
from hvdlite.launch.server import Failure, Server
from hvdlite.launch.worker import RemoteError, pack, unpack
from hvdlite.observe.protocol import Part
from hvdlite.world.launchers import without_rank

_START_TIMEOUT = 120.0
_NO_FUNCTION = "the first argument is the function to run, not {!r}"
_ROOT = str(Path(__file__).resolve().parents[2])


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    *,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | int | None = False,
    env: Mapping[str, str] | None = None,
    start_timeout: float | None = None,
    np: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    executable: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function on ``num_proc`` ranks, and return what it returns on each.

    It is called from a script (which needs no ``if __name__ == "__main__"`` and is not run
    again on the ranks), from a notebook or from an interactive session. The function travels by
    cloudpickle, with what it uses of ``__main__``; modules are imported on the ranks. What the
    ranks print appears here line by line, as ``[rank] line``.

    Example::

        def train(rate):
            hvd.init()
            ...
            return accuracy

        accuracies = hvdlite.run(train, args=(0.1,), num_proc=4)

    Args:
        func: the function, which calls ``hvd.init()`` itself if it needs it.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: the number of ranks; default: 1.
        hosts: the hosts of the ranks, as in ``hvdliterun -H``: ``"host1:2,host2:2"``; default: this
            one, or the choice of the batch system.
        hostfile: instead of ``hosts``, a file with one ``host slots=N`` per line.
        output_filename: a folder; what rank N prints goes to the files ``rank.N/stdout`` and
            ``rank.N/stderr`` in it, and is not shown.
        verbose: whether to print mpirun's command line.
        env: environment variables for the ranks, on top of those of this process.
        start_timeout: seconds until all ranks must have started; default: 120.
        np: Horovod's older name of ``num_proc``.
        use_mpi: accepted because Horovod has it; ranks always run under MPI.
        use_gloo: as ``use_mpi``.
        executable: the Python that runs on the ranks; default: this one.
        **options: those of ``hvdliterun`` for communication, other hosts, the timeline, stalls and
            the log, with underscores: ``ssh_port=2222``, ``network_interface="eth0"``,
            ``mpi_args="--map-by ppr:2:node"``, ``timeline_filename="trace.json"``.

    Returns:
        The results, by rank.

    Raises:
        Exception: what the function raised on a rank, of its own class where that can be
            unpickled; on the first rank that failed, where several did. The cause has the rank
            and the traceback there.
        HorovodInternalError: a rank ended without a result (killed, ``sys.exit``), its result
            or exception cannot be pickled, or the ranks did not start.
        StartError: there is no mpirun, or the hosts are wrong (a ``ValueError``).
        TypeError: the function or its arguments cannot be pickled, ``hosts`` is no string, or there
            is no such option.
        ValueError: an option does not take its value; both ``num_proc`` and ``np``, or both
            ``hosts`` and ``hostfile``.
    """
    if num_proc is not None and np is not None:
        raise ValueError("run() got both num_proc and np, its older name; give num_proc only")
    if hosts is not None and hostfile is not None:
        raise ValueError("run() got both hosts and hostfile; give one of them")
    count = next((each for each in (num_proc, np) if each is not None), 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_proc: found {count!r}, expected a number from 1 on")
    if hosts is not None and not isinstance(hosts, str):
        raise TypeError(f"hosts: found {hosts!r}, expected a string such as 'host1:2,host2:2'")
    places = choose_hosts(hosts, None if hostfile is None else os.fspath(hostfile), count)
    output = rank.TO_LAUNCHER
    if output_filename is not None:
        output = os.path.abspath(output_filename)
        os.makedirs(output, exist_ok=True)
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: found {name!r}: {value!r}, expected strings; write str(value)")
    chosen = from_keywords(options)
    report_ignored(chosen)
    settings = {**without_rank(os.environ), **variables(chosen), **(env or {})}
    seconds = _START_TIMEOUT if start_timeout is None else float(start_timeout)
    # The folder of the script is its first entry; an interactive session has an empty one.
    path = [os.path.abspath(entry) for entry in sys.path]
    task = [pickle.dumps((path, sys.argv)), *_pack(func, args, kwargs or {})]
    job = make_job(chosen, places, settings)
    networks = ",".join(chosen.network_interfaces or ())
    with Server(None if job.is_here else own_addresses(places, networks), task, count) as server:
        command = [executable or sys.executable, "-c", worker.PROGRAM.format(_ROOT), server.address]
        job = job._replace(command=command, output=output, verbose=bool(verbose))
        deadline = time.monotonic() + seconds

        def check_start() -> None:
            if time.monotonic() > deadline and len(server.hosts) < count:
                _raise_not_started(server, f"did not start in {seconds:g} s")

        code, received = follow(job, server, check_start, captures=True)
        if not received:
            _check_end(server, code)
    if received:  # what the signal would have done without us, now that the job has ended
        signal.raise_signal(received)
        raise HorovodInternalError(f"the job was ended, because this process got {received.name}")
    return [_result(rank, server.results[rank]) for rank in range(count)]


def spawn(
    func: Callable[..., Any],
    num_proc: int,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    start_timeout: float | None = None,
) -> None:
    """Call ``func(i, *args)`` in ``num_proc`` processes of this host, i being the process's number.

    The processes are the ranks of one world: after ``hvd.init()``, ``hvd.rank()`` is the
    process's number. It returns when all have ended. Apart from the function's first argument
    and the missing results it is `run` on this host: no ``__main__`` guard is needed, output
    appears as ``[i] line``, and an exception is raised here.

    Args:
        num_proc: the number of processes.
        args: its arguments after the process's number.
        env, start_timeout: as for `run`.

    Raises:
        Exception: as `run`.
    """
    if not callable(func):
        raise TypeError(_NO_FUNCTION.format(func))
    here = f"localhost:{num_proc}"
    run(worker.numbered, (func, *args), None, num_proc, here, env=env, start_timeout=start_timeout)


def _pack(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Part]:
    if not callable(func):
        raise TypeError(_NO_FUNCTION.format(func))
    try:
        return pack((func, tuple(args), dict(kwargs)))
    except Exception as error:  # Whatever the objects in it do when they are pickled.
        raise TypeError(
            f"the function or its arguments cannot be pickled ({type(error).__name__}: {error}); "
            "make inside the function what cannot travel: open files, locks, connections"
        ) from error


def _result(rank: int, parts: list[bytearray]) -> Any:
    try:
        return unpack(parts)
    except Exception as error:  # Whatever a class does when it is unpickled.
        raise HorovodInternalError(
            f"what the function returned on rank {rank} cannot be unpickled here "
            f"({type(error).__name__}: {error}); return numbers, arrays or other plain objects"
        ) from error


def _check_end(server: Server, code: int) -> None:
    if server.failures:
        raise _first_error(list(server.failures.values()))
    missing = sorted(set(range(server.ranks)) - set(server.results))
    how = rank.describe("mpirun", code)
    if len(server.hosts) < server.ranks:
        _raise_not_started(server, f"did not start; {how}")
    if missing:
        raise HorovodInternalError(f"ranks {missing} returned no result; {how}{_printed(server)}")
    if code:
        raise HorovodInternalError(f"{how} after all ranks had returned{_printed(server)}")


def _first_error(failures: Sequence[Failure]) -> BaseException:
    """Return the first error; one that only tells of another rank's end counts last."""
    for failure in failures:
        if not failure.error:
            return HorovodInternalError(failure.text)
        sent = RemoteError(*pickle.loads(failure.error))
        if not sent.is_consequence:
            return sent.error(failure.rank)
    return RemoteError(*pickle.loads(failures[0].error)).error(failures[0].rank)


def _raise_not_started(server: Server, how: str) -> NoReturn:
    missing = sorted(set(range(server.ranks)) - set(server.hosts))
    raise HorovodInternalError(
        f"ranks {missing} of {server.ranks} {how}; check the hosts and their slots, or raise "
        f"start_timeout{_printed(server)}"
    )


def _printed(server: Server) -> str:
    return "\n".join(["; mpirun printed:", *server.printed]) if server.printed else ""
