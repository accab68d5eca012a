"""Uncaught exceptions: one that ends a rank ends its job, since the others would wait for it.

The death of another rank is noticed elsewhere: in ``transport/`` and by the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import linecache
import logging
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import NamedTuple, NoReturn

from hvdlite.errors import HorovodInternalError, LauncherError, RankGoneError
from hvdlite.observe import status, timeline
from hvdlite.observe.protocol import MET, rank_here

# Seconds in which ranks that fail together print their errors, before one of them ends the job.
_OTHERS = 0.5

_CONSEQUENCE = "consequence"
_OMITTED = "(HVDLITE_LOG_LEVEL=debug shows the lines of hvdlite, too)\n"

_log = logging.getLogger("hvdlite")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class JobRank(NamedTuple):
    """This process as a rank of a job, which an exception ends.

    Attributes:
        job: the job's name, the same on all ranks.
        is_elastic: whether the other ranks go on without this one.
    """

    rank: int
    size: int
    job: str
    is_elastic: bool = False

    def __str__(self) -> str:
        what = "leaves" if self.is_elastic else "ends"
        # Its number for hvdliterun, which ranks do not keep when others have died.
        first = rank_here()
        start = f" (rank {first} at the start)" if first != self.rank else ""
        return f"rank {self.rank} of {self.size}{start} {what} the job"


_find_job_rank: Callable[[], JobRank | None] | None = None
_reported: BaseException | None = None
_claims: list[socket.socket] = []


def install(find_job_rank: Callable[[], JobRank | None]) -> None:
    """Make uncaught exceptions of the main thread end the job; once per process.

    Args:
        find_job_rank: returns the rank and its job; None if an exception concerns this process
            alone.
    """
    global _find_job_rank
    is_installed, _find_job_rank = _find_job_rank is not None, find_job_rank
    if is_installed:
        return
    previous = sys.excepthook
    users = None if previous is sys.__excepthook__ else previous

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _reported
        if isinstance(error, LauncherError):
            _write(f"hvdlite: {error}\n")
            return
        job_rank = _job_rank(error)
        if job_rank is None:
            previous(kind, error, trace)
            return
        # A hook that was installed later has called this one, and may have replaced standard error
        # by a buffer of its own: let it finish.
        outermost = sys.excepthook is hook
        try:
            _reported = error
            _report(job_rank, error, users and partial(users, kind, error, trace))
        finally:
            if outermost:
                _end_job(job_rank, error)

    sys.excepthook = hook
    # Python's own atexit comes after it has waited for threads, which may need the other ranks.
    register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
    register(_end_after_other_hooks)


def _job_rank(error: BaseException) -> JobRank | None:
    """Return this rank, which the error ends; None: there is none, or it concerns it alone.

    The job ends with it if the error is about communication.
    """
    job_rank = _find_job_rank() if _find_job_rank else None
    if job_rank is not None and isinstance(error, HorovodInternalError):
        # Those that are left cannot go on either, or have come to their end before.
        status.note(MET, False)
        return job_rank._replace(is_elastic=False)
    return job_rank


def _end_after_other_hooks() -> None:
    """End the job if a hook that was installed later has handled the exception."""
    error = getattr(sys, "last_value", None)
    trace: TracebackType | None = getattr(sys, "last_traceback", None)
    # pytest and IPython keep caught ones, too, which begin further inside.
    if not isinstance(error, BaseException) or trace is None or trace.tb_frame.f_back is not None:
        return
    job_rank = _job_rank(error)
    if job_rank is None:
        return
    try:
        if error is not _reported:
            _write(_line(job_rank, error))
    finally:
        _end_job(job_rank, error)


def _report(job_rank: JobRank, error: BaseException, print_it: Callable[[], object] | None) -> None:
    """Print the traceback, or one line if another rank has printed the same.

    Args:
        print_it: prints the traceback with the hook that the user had installed before.
    """
    is_told = _leave_out_own_frames(error)
    text = "".join(traceback.format_exception(error))
    summary = _summary(error)
    if all(isinstance(one, HorovodInternalError) for one in chain(error)):
        # The claim of a rank that is gone, which may have printed why, is gone with it.
        is_about_end = any(isinstance(one, RankGoneError) for one in chain(error))
        first = _claim(job_rank.job, _CONSEQUENCE) and not is_about_end
        is_new = _claim(job_rank.job, summary)
    else:
        _claim(job_rank.job, _CONSEQUENCE)
        first = is_new = _claim(job_rank.job, text)
    if not first:
        # Ranks that disagree raise the same error; the line that helps comes once.
        same = f"the same error{_users_line(error)}\n"
        is_known = is_told and not is_new
        _write(f"hvdlite: {job_rank}: {same}" if is_known else _line(job_rank, error))
    elif print_it:
        _write(f"hvdlite: {job_rank}:\n")
        print_it()
    elif is_told:
        last = "".join(traceback.format_exception_only(error))
        details = "" if last.strip() == summary else last
        text = text.removesuffix(last)
        _write(f"hvdlite: {job_rank}: {summary}\n{details}{text}{_OMITTED}")
    else:
        # One write, so that the lines of several ranks do not mix.
        _write(f"hvdlite: {job_rank}:\n{text}")


def _leave_out_own_frames(error: BaseException) -> bool:
    """Leave hvdlite's frames out of the traceback of an error that hvdlite raises on purpose.

    They are those of an error that the user's code raises, too, where hvdlite has called it. An
    error that hvdlite itself makes keeps them, and so do all at the log level DEBUG.

    Returns:
        Whether hvdlite has raised it on purpose.
    """
    is_told = False
    for each in chain(error):
        frames: list[TracebackType] = []
        while trace := frames[-1].tb_next if frames else each.__traceback__:
            frames.append(trace)
        files = [frame.tb_frame.f_code.co_filename for frame in frames]
        own = [number for number, file in enumerate(files) if file.startswith(_OWN)]
        inner = files[own[-1] + 1 :] if own else []
        has_users = any(map(is_users, inner))
        # A line that raises an exception is meant to; in others something has failed.
        line = linecache.getline(files[-1], frames[-1].tb_lineno) if own and not inner else ""
        is_meant = bool(own) and (
            isinstance(each, HorovodInternalError) or line.strip().startswith("raise")
        )
        if each is error:
            is_told = is_meant
        if (has_users or is_meant) and not _log.isEnabledFor(logging.DEBUG):
            kept: TracebackType | None = None
            for number, frame in reversed([*enumerate(frames)]):
                if number not in own:
                    kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
            each.__traceback__ = kept
    return is_told


def _summary(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # The text of an error from TensorFlow's graphs has a traceback in it, and ours after that.
    return ([line for line in lines if "Error: " in line] or lines)[-1].strip()


def _line(job_rank: JobRank, error: BaseException) -> str:
    return f"hvdlite: {job_rank}: {_summary(error)}{_users_line(error)}\n"


def _users_line(error: BaseException) -> str:
    """Return the last line of the user's own code in an exception's traceback."""
    own = [
        f" ({frame.filename}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if is_users(frame.filename)
    ]
    return own[-1] if own else ""


def is_users(file: str) -> bool:
    """Return whether a file belongs to the program, not to Python, a package or hvdlite."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")}
    others = ("<frozen", *(os.path.join(path, "") for path in installed))
    # Of this user, of the system (Debian), and those with compiled parts (lib64) lie elsewhere.
    is_package = re.search("/(?:site|dist)-packages/", file)
    return not (is_package or file.startswith((*others, _OWN)))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes and contexts, as a traceback shows them."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        cause = following.__cause__
        following = cause or (None if following.__suppress_context__ else following.__context__)


def _claim(job: str, text: str) -> bool:
    """Return whether this rank is the first of its job on this host to claim a text.

    A claim is the name of a socket, to which nobody connects. It vanishes when its process ends.
    """
    name = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0hvdlite-{job}-{name}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE  # such names are Linux's; elsewhere all are first
    _claims.append(claim)
    return True


def _write(text: str) -> None:
    # Standard error may be closed, or the reader of a pipe gone.
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _end_job(job_rank: JobRank, error: BaseException) -> NoReturn:
    try:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        timeline.stop()
        time.sleep(_OTHERS)
    finally:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        # hvdliterun ends the job when one rank does, without MPI_Abort's words about it.
        if "HVDLITE_LAUNCHER" not in os.environ and job_rank.is_elastic:
            os.kill(os.getpid(), signal.SIGKILL)  # which MPI takes for a failure, unlike an exit
        if "HVDLITE_LAUNCHER" not in os.environ:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code)
        os._exit(code)
