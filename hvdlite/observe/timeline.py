"""The timeline: a trace of all ranks for Perfetto and chrome://tracing.

The file is a JSON array of Chrome trace events. A process is a rank; its rows are the
``gradients`` lane, the ``named`` lane, and ``step``, the training thread.

======================================  =========  ============================================
event                                   row        meaning; * is not in Horovod
======================================  =========  ============================================
NEGOTIATE_ALLREDUCE, ..._ALLGATHER,     a lane     waiting for the other ranks, and agreeing
..._BROADCAST, ..._BARRIER                         with them on the next operation
ALLREDUCE, ALLGATHER, BROADCAST,        a lane     the operation; contains the next three
BARRIER
MEMCPY_IN_FUSION_BUFFER                 a lane     packing
EXCHANGE *                              a lane     transport and reduction
MEMCPY_OUT_FUSION_BUFFER                a lane     unpacking
CYCLE_START                             a lane     start of a round; only with ``mark_cycles``
QUEUE                                   a lane     from submission to execution
STEP *                                  step       from the first gradient to the last average
SYNCHRONIZE *                           step       a thread is blocked until an operation ends
======================================  =========  ============================================

Tensors are named as in Horovod: by the kind of the operation and its name, ``allreduce.loss``.

The events of a row are disjoint or nested, as viewers require; QUEUE events overlap and therefore
have tracks of their own, as do SYNCHRONIZE events of other threads than the main one.

Times are microseconds since 1970. They come from the monotonic clock, which the processes of a node
share; its distance to the wall clock is measured once, at the start. The ranks of a node therefore
agree to a microsecond, and the ranks of different nodes to the accuracy of the nodes' clocks at
the start (about a millisecond with NTP) plus the drift since.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hvdlite.base import observers
from hvdlite.observe.trace_file import Event, Run, TraceFile

QUEUE = "QUEUE"
NEGOTIATE = "NEGOTIATE_"  # prefix of the kind of an operation
ALLREDUCE = "ALLREDUCE"
MEMCPY_IN_FUSION_BUFFER = "MEMCPY_IN_FUSION_BUFFER"
EXCHANGE = "EXCHANGE"
MEMCPY_OUT_FUSION_BUFFER = "MEMCPY_OUT_FUSION_BUFFER"
CYCLE_START = "CYCLE_START"
STEP = "STEP"
SYNCHRONIZE = "SYNCHRONIZE"

_log = logging.getLogger("hvdlite")
# Time between two writes: a killed process loses the events of this time.
_PAUSE = 0.01
_EVENTS_PER_WRITE = 512
_ROWS_PER_RANK = 1000
_SECONDS_TO_FLUSH = 10.0

# Phase, row, event, start and end in monotonic ns, arguments.
_Record = tuple[str, str, str, int, int, dict[str, Any]]


class Timeline:
    """The events of this process, and the thread that writes them.

    Args:
        path: of the file, in an existing folder; all ranks that can reach it share it.
        run: the same on all ranks; a file of another run is replaced.
        mark_cycles: whether lanes record CYCLE_START.
    """

    #: Return the time, in nanoseconds, for `complete` and `overlapping`.
    now = staticmethod(time.monotonic_ns)

    def __init__(self, path: str, rank: int, run: Run, mark_cycles: bool = False) -> None:
        self.path = path
        self.mark_cycles = mark_cycles
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._overlapping = 0
        # When each lane has begun to meet the others, or to exchange data.
        self._began: dict[str, int] = {}
        self._to_wall = _distance_to_wall_clock()
        process = f"rank {rank} on {socket.gethostname()}"
        self._file = TraceFile(path, run, self._metadata("process_name", name=process))
        self._file.append([self._metadata("process_sort_index", sort_index=rank)])
        self._queue: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()
        self._put = self._queue.put
        self._thread = threading.Thread(target=self._serve, name="hvdlite-timeline", daemon=True)
        self._thread.start()

    def complete(self, row: str, event: str, start: int, end: int, /, **args: Any) -> None:
        """Record an event that has ended.

        Args:
            row: ``"gradients"``, ``"named"`` or ``"step"``.
            event: one of this module's names.
            start, end: times, by `now`.
            **args: details for the viewer: ``tensor="loss"``, ``bytes=4096``.
        """
        self._put(("X", row, event, start, end, args))

    @contextlib.contextmanager
    def span(self, row: str, event: str, /, **args: Any) -> Iterator[None]:
        """Record the duration of a block; arguments as for `complete`."""
        start = self.now()
        try:
            yield
        finally:
            self.complete(row, event, start, self.now(), **args)

    def overlapping(self, row: str, event: str, start: int, end: int, /, **args: Any) -> None:
        """Record an event like `complete`, in a track of its own."""
        self._put(("b", row, event, start, end, args))

    def observe(self, point: str, row: str = "", about: Any = ()) -> None:
        """Record what a lane does, and who waits; arguments as in `hvdlite.base.observers`."""
        if point == "waited":
            is_main = threading.get_ident() == threading.main_thread().ident
            record = self.complete if is_main else self.overlapping  # those of several threads do
            record("step", SYNCHRONIZE, about, self.now(), tensor=row)
            return
        operations: Sequence[Any] = about
        now, began = self.now(), self._began.get(row, 0)
        if point in ("meet", "exchange"):
            self._began[row] = now
            if point == "meet" and self.mark_cycles:
                self._put(("i", row, CYCLE_START, now, now, {}))
        elif point == "agreed" and operations and began:
            first = operations[0]
            self.complete(row, NEGOTIATE + first.activity, began, now, tensor=first.traced_name)
        elif point == "exchanged" and began:
            for each in operations:
                submitted = int(each.submitted * 1e9)
                self.overlapping(row, QUEUE, submitted, began, tensor=each.traced_name)
            details = {"tensors": len(operations), "bytes": sum(each.nbytes for each in operations)}
            if sent := sum(each.sent for each in operations):
                details["sent"] = sent
            first = operations[0]
            self.complete(row, first.activity, began, now, tensor=first.traced_name, **details)

    def close(self) -> None:
        """Write the remaining events, and close the file."""
        self._put(None)
        self._thread.join(_SECONDS_TO_FLUSH)
        if self._thread.is_alive():
            _log.warning("rank %d: the last events are not in %s yet", self._rank, self.path)

    def _serve(self) -> None:
        """Write the queued events, up to None, which is the last one."""
        batch: list[_Record | None] = []
        try:
            while None not in batch:
                batch = [self._queue.get()]
                time.sleep(_PAUSE)
                batch += [self._queue.get() for _ in range(self._queue.qsize())]
                records = [record for record in batch if record is not None]
                for begin in range(0, len(records), _EVENTS_PER_WRITE):
                    part = records[begin : begin + _EVENTS_PER_WRITE]
                    self._file.append([each for record in part for each in self._events(record)])
        except Exception as error:  # Training continues without a timeline.
            _log.warning("rank %d: the timeline %s ends here: %s", self._rank, self.path, error)
        finally:
            self._file.close()
            # Last, so that whoever sees no timeline also finds the warning and the file closed.
            _forget(self)

    def _events(self, record: _Record) -> Iterator[Event]:
        phase, row, name, start, end, args = record
        thread = self._rows.get(row)
        if thread is None:
            # Perfetto names threads by this number alone, so it must be unique across ranks.
            thread = (self._rank + 1) * _ROWS_PER_RANK + len(self._rows) + 1
            self._rows[row] = thread
            yield self._metadata("thread_name", tid=thread, name=row)
        # Whole microseconds, rounded down: nested events stay nested in any viewer.
        began, ended = (start + self._to_wall) // 1000, (end + self._to_wall) // 1000
        event: Event = {"name": name, "ph": phase, "pid": self._rank, "tid": thread, "ts": began}
        if phase == "X":
            event["dur"] = ended - began
        elif phase == "i":
            event["s"] = "t"
        else:
            self._overlapping += 1
            event |= {"cat": row, "id": f"{self._rank}.{self._overlapping}"}
        event["args"] = args
        yield event
        if phase == "b":
            yield {**event, "ph": "e", "ts": ended}

    def _metadata(self, kind: str, tid: int | None = None, **args: Any) -> Event:
        thread = {} if tid is None else {"tid": tid}
        return {"name": kind, "ph": "M", "pid": self._rank, **thread, "args": args}


#: The open timeline of this process; None: nothing is recorded.
current: Timeline | None = None


def start(
    file_path: str | os.PathLike[str], rank: int, run: Run, mark_cycles: bool = False
) -> None:
    """Start to record the events of this process; arguments as for `Timeline`.

    Raises:
        ValueError: a timeline is being recorded already.
        OSError: the file cannot be written.
    """
    global current
    if current is not None:
        raise ValueError(
            f"rank {rank}: a timeline is being written to {current.path}; "
            "call hvd.stop_timeline() before the next one"
        )
    path = os.path.abspath(os.fspath(file_path))
    try:
        current = Timeline(path, rank, run, mark_cycles)
        observers.add(current.observe)
    except OSError as error:
        raise OSError(
            error.errno,
            f"rank {rank} on {socket.gethostname()}: the timeline {path} cannot be written: "
            f"{error.strerror}; name a file in a folder that exists there and is yours to write",
        ) from None


def stop() -> None:
    """Write the remaining events, and stop recording; without a timeline, do nothing."""
    ending = current
    if ending is not None:
        ending.close()
        _forget(ending)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def span(row: str, event: str, **args: Any) -> contextlib.AbstractContextManager[None]:
    """Record the duration of a block; arguments as for `Timeline.complete`."""
    return _NOTHING if current is None else current.span(row, event, **args)


def _forget(timeline: Timeline) -> None:
    global current
    if current is timeline:
        current = None
        observers.remove(timeline.observe)


def _leave_to_parent() -> None:
    # An open file in the child would keep the parent's lock after the parent's end.
    if current is not None:
        with contextlib.suppress(OSError):
            current._file.close()
        _forget(current)


def _distance_to_wall_clock() -> int:
    """Return wall clock minus monotonic clock in nanoseconds, from the fastest of 16 readings."""
    readings = []
    for _ in range(16):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


os.register_at_fork(after_in_child=_leave_to_parent)
