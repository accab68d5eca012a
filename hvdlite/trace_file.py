"""A file of Chrome trace events that several processes write together.

The file is a JSON array, and a whole one after every event. Who adds events takes a lock on the
file, and puts them, with a new closing bracket, in the place of the old one, in one write. So a
reader that takes the lock (``flock``, shared) never sees anything but valid JSON.

A reader without the lock may catch a write half way. To make that unlikely, blanks follow the
bracket while the file is written. A write then stays inside the file, which is far quicker than
one that makes it grow: while two ranks wrote 200 times a second each, 1 of 23,000 looks at the
end of the file was unlucky, and 1 of 350 without the blanks. Adding blanks, and cutting them
off in the end, harms nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import operator
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Event = dict[str, Any]

# A line break stands in JSON text only where one of these is.
_BEGINNING = b"[\n"
_SEPARATOR = b"\n,"
_BRACKET = b"\n]"
_END = _BRACKET + b"\n"
_BLANKS = 2**14
_LONGEST_FIRST_LINE = 4096
# What is searched for the end of the last whole write; no write is that long.
_TAIL = 2**24
# Who writes holds the lock for less than a millisecond, a reader as long as it reads.
_SECONDS_TO_LOCK = 30.0
_SECONDS_BETWEEN_TRIES = 1e-3


class Run(NamedTuple):
    """Whose events a file holds; the same on all ranks.

    Attributes:
        job: different in every job.
        start: counts the job's timelines.
    """

    job: str
    start: int


class TraceFile:
    """The file of a run; the first of its processes replaces what was there.

    The file's first event names the run. So processes find out who is the first without a word
    to each other, and whether or not they share a file system.

    Args:
        path: of the file, in a folder that exists.
        run: whose events these are.
        event: this process's first, which has ``args``.

    Raises:
        OSError: the file cannot be opened, locked or written.
    """

    def __init__(self, path: str, run: Run, event: Event) -> None:
        first = [{**event, "args": {**event["args"], **run._asdict()}}]
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise OSError(errno.EINVAL, "Not a regular file")
            with self._locked():
                if self._holds(run):
                    self._append(first)
                else:
                    os.ftruncate(self._descriptor, 0)
                    self._write(_BEGINNING + _encode(first) + _END, 0)
        except BaseException:
            self.abandon()
            raise

    def append(self, events: Sequence[Event]) -> None:
        """Add events in one write.

        Raises:
            OSError: they cannot be written; the file is as it was.
        """
        with self._locked():
            self._append(events)

    def close(self) -> None:
        """Close the file, without blanks; where others go on, they add new ones."""
        with contextlib.suppress(OSError), self._locked():
            os.ftruncate(self._descriptor, self._end() + len(_END))
        self.abandon()

    def abandon(self) -> None:
        """Let go of the file; in a forked process this leaves the parent's lock as it is."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _SECONDS_TO_LOCK
        while not self._try_to_lock():
            if time.monotonic() > deadline:
                held = (
                    f"Another process has locked it for {_SECONDS_TO_LOCK:g} s (fuser tells which)"
                )
                raise OSError(errno.EAGAIN, held)
            time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _try_to_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holds(self, run: Run) -> bool:
        """Whether the file is of this run, or of one that faster ranks have begun since."""
        head = os.pread(self._descriptor, _LONGEST_FIRST_LINE, len(_BEGINNING))
        try:
            args = json.loads(head.split(b"\n")[0])["args"]
            return bool(args["job"] == run.job and args["start"] >= run.start)
        except (ValueError, KeyError, TypeError):
            return False

    def _append(self, events: Sequence[Event]) -> None:
        end = self._end()
        addition = _SEPARATOR + _encode(events) + _END
        size = os.fstat(self._descriptor).st_size
        if size < end + len(addition):
            self._write(b" " * (end + len(addition) + _BLANKS - size), size)
        try:
            self._write(addition, end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end + len(_END))
                os.pwrite(self._descriptor, _END, end)
            raise

    def _end(self) -> int:
        """Where the events end, in bytes; what a killed process has left half is cut off."""
        size = os.fstat(self._descriptor).st_size
        for length in (2 * _BLANKS, _TAIL):
            begin = max(size - length, 0)
            tail = os.pread(self._descriptor, length, begin).rstrip()
            if tail.endswith(_BRACKET):
                return begin + len(tail) - len(_BRACKET)
        last = tail.rfind(_SEPARATOR)
        if last < 0:
            raise OSError(errno.EIO, "Something else has written to it")
        os.ftruncate(self._descriptor, begin + last)
        return begin + last

    def _write(self, content: bytes, offset: int) -> None:
        if os.pwrite(self._descriptor, content, offset) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _encode(events: Sequence[Event]) -> bytes:
    """Events as one line, without brackets; together they take half the time of one by one."""
    try:
        text = _encoder.encode(events)
    except ValueError:
        text = _encoder.encode([{**event, "args": _finite(event["args"])} for event in events])
    return text[1:-1].encode()


def _finite(args: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON has no number for, such as infinity, as text."""
    finite = {}
    for name, value in args.items():
        try:
            _encoder.encode(value)
            finite[name] = value
        except ValueError:
            finite[name] = str(value)
    return finite


def _other(value: Any) -> int | str:
    """What JSON does not know: numpy's integers, and anything else as text."""
    try:
        return operator.index(value)
    except TypeError:
        return str(value)


_encoder = json.JSONEncoder(allow_nan=False, default=_other, separators=(",", ":"))
