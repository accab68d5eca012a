"""Start and end of hvdlite in a process."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import multiprocessing.process
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from hvdlite.base import interrupts, observers, settings
from hvdlite.base.arguments import check_count
from hvdlite.engine import Engine, supervisor
from hvdlite.engine.process_sets import ProcessSet, ProcessSets, global_process_set
from hvdlite.engine.supervisor import Supervisor
from hvdlite.errors import HorovodInternalError, NotInitializedError
from hvdlite.observe import failures, protocol, status, timeline
from hvdlite.observe.trace_file import Run
from hvdlite.world import launchers, mpi, parts, world

_log = logging.getLogger("hvdlite")

_engine: Engine | None = None
_sets: ProcessSets | None = None
_ending: tuple[ProcessSets, int, float] | None = None  # a shutdown that has not come to its end
_hooked = False
_run = Run("", 0)
# Rank and size in a world that failed and has no successor.
_lost: tuple[int, int] | None = None
# Held by the thread that starts or ends a world.
_one_by_one = threading.RLock()


def engine(process_set: ProcessSet | None = None) -> Engine:
    """Return the engine of this process.

    Args:
        process_set: The process set of the engine; None: that of all ranks.

    Raises:
        NotInitializedError: before ``init()`` and after ``shutdown()``.
        HorovodInternalError: a rank has started this process.
        ValueError: the process set is not registered, or this rank is not in it.
    """
    if _engine is None or world.is_child:
        raise _unavailable()
    if process_set is None or process_set is global_process_set:
        return _engine
    return process_sets().engine(process_set)


def process_sets() -> ProcessSets:
    """Return the process sets of this process; raises as `engine`."""
    if _sets is None or world.is_child:
        raise _unavailable()
    return _sets


def add_process_set(
    process_set: ProcessSet | Sequence[int], members_only: bool = False
) -> ProcessSet:
    """Register a process set; all ranks call it, members or not, with the same ranks.

    Args:
        process_set: A process set or its ranks, in any order.
        members_only: Whether the members alone call it. The set then ends with the first death
            among them, under ``--elastic``, too; others may have the same ranks.

    Returns:
        The process set, which collectives take from now on.

    Raises:
        ValueError: it is registered, another set has the same ranks, it is empty, or it
            names something that is not an existing rank.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    added = _as_process_set(process_set)
    if members_only:
        process_sets().add_among_members(added)
    else:
        process_sets().add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set, whose collectives have all ended.

    Those call it that have registered it: all ranks, or its members.

    Returns:
        Whether it was registered. That of all ranks cannot be removed.

    Raises:
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    return process_sets().remove(process_set)


def init(
    comm: Any | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    virtual_ranks: int | None = None,
) -> None:
    """Start hvdlite: all ranks call it, before anything else; a second call does nothing.

    After it, an exception that ends the program on one rank ends it on all, with the
    traceback and the rank on standard error.

    In a worker that `multiprocessing` has started on a rank, by any method, `rank`, `size` and the
    like return that rank's values, and calls that communicate raise an error.

    Args:
        comm: The ranks that take part: None (all), a list of ranks of ``COMM_WORLD``, or
            an mpi4py communicator, which is duplicated.
        process_sets: Process sets to register at once, the same on all ranks; ``"dynamic"``,
            which Horovod needs for `add_process_set`, is accepted without effect.
        virtual_ranks: The number of parts that every global batch is cut into, however many
            processes there are, so that the weights are the same bits for any number of them, and
            whoever dies; at least as many as processes, the same on all ranks. 0: one for each
            rank; None: as ``HVDLITE_VIRTUAL_RANKS`` says.

    Raises:
        ImportError: mpi4py or an MPI library is missing.
        LauncherError: A launcher other than MPI has started several processes; not where
            ``comm`` is given. Or a rank has started this process, which is no worker of
            `multiprocessing`, or one from before the rank's ``init()``. With
            HVDLITE_CHECK_LAUNCHER=0 it is a job of one rank instead.
        SettingsError: an environment variable cannot be read.
        OSError: the file that HVDLITE_TIMELINE names cannot be written.
        ValueError, TypeError: ``comm`` or ``process_sets`` is none of the above.
    """
    with _one_by_one:
        if _engine is not None:
            return
        if _ending is not None:
            shutdown()
        if isinstance(process_sets, str) and process_sets != "dynamic":
            raise ValueError(
                f'process_sets={process_sets!r} is neither a list of process sets nor "dynamic"'
            )
        given = () if isinstance(process_sets, str) else process_sets or ()
        start(comm, [_as_process_set(each) for each in given], virtual_ranks)


def start(
    comm: Any | Sequence[int] | None,
    wanted: Sequence[ProcessSet],
    virtual_ranks: int | None,
    supervise: Supervisor | None = None,
) -> None:
    """Do what `init` does.

    Args:
        comm, virtual_ranks: As for `init`.
        supervise: Supervises the world; None: as the settings say.
    """
    global _engine, _hooked, _run, _sets, _lost
    values = settings.read()
    if virtual_ranks is not None:
        check_count("virtual_ranks", virtual_ranks, 0)
        values = dataclasses.replace(values, virtual_ranks=int(virtual_ranks))
    division = parts.divide(values.virtual_ranks)
    parent = launchers.find_parent()
    if parent is not None and _is_worker():
        world.enter_of_parent(parent.place)
        parts.enter(division)
        return
    failures.install(_job_rank)
    if not launchers.take_place(parent, values.check_launcher):
        values = dataclasses.replace(values, elastic=False, spares=0, timeline="")
    status.note(protocol.JOINING, time.monotonic_ns())
    try:
        MPI = mpi.load()  # noqa: N806 - the name that everybody knows it by
    finally:
        status.note(protocol.JOINING, 0)
    if comm is None and values.check_launcher:
        launchers.check(MPI.COMM_WORLD.size)
    level = {"trace": "DEBUG", "fatal": "CRITICAL"}.get(values.log_level, values.log_level.upper())
    _log.setLevel(level)
    is_first = not _hooked
    status.install(_pending)
    in_charge = supervise or supervisor.choose(values)
    in_charge.process_sets = wanted
    run = Run("", 0)

    def build(comm: Any, create: world.Create) -> Engine:
        nonlocal run
        settings.compare(values, comm)
        division.check(comm.size)
        whole = world.World.split(MPI, comm, values.force_local_size, create)
        for observe in observers.current:
            observe("form")
        division.step = max(comm.allgather(division.step))
        run = Run(comm.bcast(os.urandom(8).hex()), 0)
        in_charge.watch(MPI, whole, values, _enter)
        return Engine(MPI, whole, values, supervisor=in_charge)

    formed = in_charge.form(MPI, comm, values, build)
    whole = formed.world
    interrupts.install()
    status.install(_pending)
    status.note(protocol.LEAVING, 0)
    _keep_files_together()
    sets = ProcessSets(MPI, whole, formed)
    # Together: if a signal's handler raises before, there is nothing to shut down, and else all.
    _engine, _sets, _run, _lost = formed, sets, run, None
    world.enter(whole)
    parts.enter(division)
    if not _hooked:
        _hooked = True
        atexit.register(leave_world)  # at the end of a program that has done what it should
        for line in settings.ignored() if whole.comm.rank == 0 else ():
            _log.warning("%s", line)
    try:
        for each in in_charge.process_sets:
            sets.add(each, of=whole)
        if values.timeline:
            start_timeline(values.timeline, values.timeline_mark_cycles)
        if is_first:
            observers.plan(*in_charge.place)
        for observe in observers.current:
            observe("start")
    except (ValueError, OSError, HorovodInternalError):
        shutdown()
        raise
    in_charge.begin(formed)


def _enter(whole: world.World) -> None:
    """Go on in a world of fewer ranks, with new numbers."""
    if _ending is None:  # else `shutdown` waits for ranks that die meanwhile
        world.enter(whole)
    if _ending is not None:  # it has begun since
        world.enter(None)
    if (sets := _sets) is not None:
        sets.follow(whole)


def _as_process_set(given: ProcessSet | Sequence[int]) -> ProcessSet:
    return given if isinstance(given, ProcessSet) else ProcessSet(given)


def shutdown() -> None:
    """End hvdlite: collective, bounded in time, and run at exit if nobody calls it.

    Operations that other ranks still wait for raise there. ``init()`` works again
    afterwards. It does nothing before ``init()``. If an exception from a signal handler ends
    it, another call (at the latest that at exit) continues it.
    """
    if leave_world():
        # A failure from now on ends the job: the others may have come to their end, too.
        status.note(protocol.MET, False)


def leave_world() -> bool:
    """Do what `shutdown` does, before another world is formed; return whether all ranks have."""
    global _engine, _sets, _ending
    # A child of a rank (a data loader's worker) has no lanes and must not end its parent's. Where a
    # thread is in `init`, perhaps for ever, there is nothing to wait for.
    if world.is_child or (_engine is None and _ending is None):
        return False
    with _one_by_one:
        if _engine is not None and _sets is not None:
            # For hvdliterun, which names this rank if it ends with an error: the others, which may
            # fail because of it, end sooner than a rank that calls ``sys.exit(3)``.
            status.note(protocol.LEAVING, time.monotonic_ns())
            _ending = _sets, _engine.rank, _engine.settings.shutdown_timeout_seconds
            _engine = _sets = None
            world.enter(None)
        if _ending is None:
            return False
        ending, rank, limit = _ending
        start = time.monotonic()
        ended = ending.close()
        if not ended and time.monotonic() - start >= limit:
            _log.warning(
                "rank %d: left without the others, which did not call shutdown() within %.0f s",
                rank,
                limit,
            )
        # Otherwise communication failed earlier, and its waiters have got the error.
        timeline.stop()
        interrupts.uninstall()
        status.install(_pending)
        _ending = None
        return ended


def _unlock() -> None:
    """Let a forked child start a world: it lacks the thread that may hold the lock."""
    global _one_by_one
    _one_by_one = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record what the ranks do and when, for Perfetto or chrome://tracing.

    All ranks call it. Those that share a file system write one file together, and replace
    what it held; `hvdlite.observe.timeline` explains the events. The same as the environment
    variable ``HVDLITE_TIMELINE`` from `init` on.

    Args:
        file_path: of the file, ``trace.json`` for example; its folder exists.
        mark_cycles: whether to mark where each round of communication begins.

    Raises:
        NotInitializedError: before ``init()``.
        ValueError: a timeline is being recorded already.
        OSError: the file cannot be written.
    """
    global _run
    engine()  # raises where there is none
    # Counted before anything can be refused, so that the ranks stay in step.
    _run = _run._replace(start=_run.start + 1)
    timeline.start(file_path, world.rank(), _run, mark_cycles)


def stop_timeline() -> None:
    """Write the recorded events and stop recording; ``shutdown()`` does it, too."""
    timeline.stop()


def note_lost_world(rank: int, size: int) -> None:
    """Let an exception that ends this rank end the job even after its world has failed.

    Does nothing where there is one.

    Args:
        rank, size: of the world that there was.
    """
    global _lost
    if not world.is_initialized():
        _lost = (rank, size)


def _unavailable() -> Exception:
    if not world.is_initialized():
        return NotInitializedError()
    return world.child_error()


def _keep_files_together() -> None:
    """Have multiprocessing keep its files in hvdliterun's folder, which goes with the job.

    A rank that is killed, or ends with a traceback, removes none of them, nor do its data loaders.
    """
    folder = os.environ.get(protocol.FOLDER, "")
    config = getattr(multiprocessing.process.current_process(), "_config", None)
    # Sockets lie in it, whose paths have 107 bytes at most.
    if config is not None and len(os.fsencode(folder)) < 80 and os.path.isdir(folder):
        config.setdefault("tempdir", folder)


def _pending() -> tuple[int, list[status.Pending]] | None:
    return None if _sets is None else (world.rank(), _sets.pending())


def _is_worker() -> bool:
    """Return whether `multiprocessing` has started this process, or is about to."""
    is_loading = getattr(multiprocessing.process.current_process(), "_inheriting", False)
    return is_loading or multiprocessing.process.parent_process() is not None


def _job_rank() -> failures.JobRank | None:
    """Return the rank whose exceptions end the job; None in a child of one, or on a rank alone."""
    if world.is_child:
        return None
    rank, size = (world.rank(), world.size()) if world.is_initialized() else _lost or (0, 1)
    engine = _engine  # which another thread may end meanwhile
    is_elastic = engine is not None and engine.supervisor.survives
    return failures.JobRank(rank, size, _run.job, is_elastic) if size > 1 else None
