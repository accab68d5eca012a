"""A file of Chrome trace events that several processes write together.

The file is a JSON array, and complete after every event. A writer locks the file and overwrites the
closing bracket by its events and a new bracket, in one write. A reader that takes the lock
(``flock``, shared) therefore always sees valid JSON, also while ranks run or after some have been
killed.

One file per rank, merged at the end, would need no lock; but a killed job would leave nothing under
the user's path, and the ranks would have to agree on who merges and when.

A reader without the lock may see half of a write: while two ranks wrote 200 times a second each, 1
of 350 readings of the end of the file did.
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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Event = dict[str, Any]

# JSON text has line breaks in these places only.
_BEGINNING = b"[\n"
_SEPARATOR = b"\n,"
_END = b"\n]\n"
_MAX_FIRST_LINE = 4096
# Bytes to search for the end of the last complete write; no write is that long.
_TAIL = 2**24
# A writer holds the lock for less than a millisecond, a reader as long as it reads.
_SECONDS_TO_LOCK = 30.0
_SECONDS_BETWEEN_TRIES = 1e-3


class Run(NamedTuple):
    """Identity of a timeline, the same on all ranks.

    Attributes:
        job: unique for each job.
        start: number of the timeline in the job.
    """

    job: str
    start: int


class TraceFile:
    """The trace file of a run; its first process replaces an existing file.

    The file's first event names the run, so that processes find out which is the first without
    communication, on one file system or several.

    Args:
        path: of the file, in an existing folder.
        event: first event of this process, with ``args``.
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
            self.close()
            raise

    def append(self, events: Sequence[Event]) -> None:
        """Add events in one write.

        Raises:
            OSError: they cannot be written; the file is unchanged.
        """
        with self._locked():
            self._append(events)

    def close(self) -> None:
        """Close the file; in a forked process the parent's lock is unaffected."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _SECONDS_TO_LOCK
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    held = f"Another process has locked it for {_SECONDS_TO_LOCK:g} s"
                    raise OSError(errno.EAGAIN, f"{held} (fuser tells which)") from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _holds(self, run: Run) -> bool:
        """Return whether the file belongs to this run or a later one, by faster ranks."""
        head = os.pread(self._descriptor, _MAX_FIRST_LINE, len(_BEGINNING))
        try:
            args = json.loads(head.split(b"\n")[0])["args"]
            return bool(args["job"] == run.job and args["start"] >= run.start)
        except (ValueError, KeyError, TypeError):
            return False

    def _append(self, events: Sequence[Event]) -> None:
        end = self._end()
        try:
            self._write(_SEPARATOR + _encode(events) + _END, end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end + len(_END))
                os.pwrite(self._descriptor, _END, end)
            raise

    def _end(self) -> int:
        """Return the offset of the end of the events; cut off an incomplete write."""
        size = os.fstat(self._descriptor).st_size
        end = max(size - len(_END), 0)
        if os.pread(self._descriptor, len(_END), end) == _END:
            return end
        begin = max(size - _TAIL, 0)
        last = os.pread(self._descriptor, _TAIL, begin).rfind(_SEPARATOR)
        if last < 0:
            raise OSError(errno.EIO, "Something else has written to it")
        os.ftruncate(self._descriptor, begin + last)
        return begin + last

    def _write(self, content: bytes, offset: int) -> None:
        if os.pwrite(self._descriptor, content, offset) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _encode(events: Sequence[Event]) -> bytes:
    """Return the events as one line without brackets; this takes half the time of one by one."""
    return _encoder.encode(events)[1:-1].encode()


# JSON lacks numpy's integers.
_encoder = json.JSONEncoder(allow_nan=False, default=operator.index, separators=(",", ":"))
