"""`run` and `spawn`: a Python function on N ranks, from a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.errors import HorovodInternalError
from hvdlite.launch import calls
from hvdlite.launch.hosts import Host, check_slots, parse_hostfile, parse_hosts
from hvdlite.launch.parcel import Part, pack, unpack


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
        func: the function. To call ``hvd.init()`` is its own affair.
        args: its arguments.
        kwargs: its keyword arguments.
        num_proc: the number of ranks; default: 1.
        hosts: where they run, as in ``hvdliterun -H``: ``"host1:2,host2:2"``; default: here, or
            where the batch system says.
        hostfile: instead of ``hosts``, a file with one ``host slots=N`` per line.
        output_filename: a folder; what rank N prints goes to the files ``rank.N/stdout`` and
            ``rank.N/stderr`` in it, and is not shown.
        verbose: whether to print mpirun's command line.
        env: environment variables for the ranks, on top of those of this process.
        start_timeout: seconds until all ranks must have started; default: 120.
        np: Horovod's older name of ``num_proc``.
        use_mpi: accepted because Horovod has it; ranks always run under MPI.
        use_gloo: as ``use_mpi``.

    Returns:
        The results, by rank.

    Raises:
        Exception: what the function raised on a rank, of its own class where that can be
            unpickled; on the first rank that failed, where several did. The cause has the rank
            and the traceback there.
        HorovodInternalError: a rank ended without a result (killed, ``sys.exit``), its result
            or exception cannot be pickled, or the ranks did not start.
        LaunchError: there is no mpirun, or the hosts are wrong (a ``ValueError``).
        TypeError: the function or its arguments cannot be pickled.
        ValueError: both ``num_proc`` and ``np``, or both ``hosts`` and ``hostfile``.
    """
    if num_proc is not None and np is not None:
        raise ValueError("run() got both num_proc and np, its older name; give num_proc only")
    if hosts is not None and hostfile is not None:
        raise ValueError("run() got both hosts and hostfile; give one of them")
    count = _count(np if num_proc is None else num_proc)
    places = parse_hosts(hosts) if hosts is not None else []
    if hostfile is not None:
        places = parse_hostfile(os.fspath(hostfile))
    check_slots(places, count)
    options = calls.Options(
        count,
        places,
        _folder(output_filename),
        _variables(env),
        calls.START_TIMEOUT if start_timeout is None else float(start_timeout),
        bool(verbose),
    )
    results = calls.call(_pack(func, args, kwargs or {}), options, numbered=False)
    return [_result(rank, results[rank]) for rank in range(count)]


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
        func: the function; what it returns is dropped.
        num_proc: the number of processes.
        args: its arguments after the process's number.
        env: environment variables for the processes, on top of those of this one.
        start_timeout: seconds until all processes must have started; default: 120.

    Raises:
        Exception: as `run`.
    """
    count = _count(num_proc)
    timeout = calls.START_TIMEOUT if start_timeout is None else float(start_timeout)
    here = [Host("localhost", count)]
    options = calls.Options(count, here, env=_variables(env), start_timeout=timeout)
    calls.call(_pack(func, args, {}), options, numbered=True)


def _count(num_proc: int | None) -> int:
    if num_proc is None:
        return 1
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ValueError(f"num_proc: found {num_proc!r}, expected a number from 1 on")
    return num_proc


def _variables(env: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: found {name!r}: {value!r}, expected strings; write str(value)")
    return dict(env or {})


def _folder(name: str | os.PathLike[str] | None) -> str:
    if name is None:
        return ""
    path = os.path.abspath(name)
    os.makedirs(path, exist_ok=True)
    return path


def _pack(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Part]:
    if not callable(func):
        raise TypeError(f"the first argument is the function to run, not {func!r}")
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
