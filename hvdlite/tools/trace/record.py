"""The record of a trace: the operations and waits of each rank, in compact arrays.

A trace of 100 MB holds some 700,000 events; as arrays they take a tenth of that. They are read one
after the other, in bounded memory, also from a file that is cut off.
"""

from __future__ import annotations

import functools
import json
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdlite.errors import StartError
from hvdlite.observe import timeline

Event = dict[str, Any]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Operations = np.recarray[Any, Any]

_CHARACTERS = 2**20  # read at once; no event is longer
_BETWEEN = re.compile(r"[\s,]*")
_OBJECT = re.compile(r'\s*\{.*?"traceEvents"\s*:\s*\[', re.DOTALL)
_ARRAY = re.compile(r"\s*\[")
_REMEDY = "hvdliterun --timeline-filename FILE records one"
_decode = json.JSONDecoder().raw_decode
_WITHOUT_NAME = re.compile(r"\.noname\.\d+$")
_LARGEST = 2**53
# An operation of a rank; times in microseconds:
# tensor: number of the tensor's name;
# occurrence: how many operations of that tensor came before, the same on all ranks;
# ready: when this rank began to wait for the others; -1: it did not, because an operation before
#     had brought them together;
# start: when all ranks had come; end: when the operation was over.
_OPERATION = [(name, np.int64) for name in ("tensor", "occurrence", "ready", "start", "end")]


class RankRecord:
    """The operations, waits and steps of one rank.

    Attributes:
        name: as the timeline names the rank: ``rank 0 on host``.
        first, last: the times of its first event and its last; of the analysed part, if the trace
            tells steps; -1 without any.
        synchronize: starts and ends of the times in which a thread was blocked.
        steps: the ends of its steps, by the name of their exchange.
        ends: those of the steps that are analysed.

    The properties are those of the complete record.
    """

    def __init__(self) -> None:
        self.name = ""
        self.first = self.last = -1
        self.synchronize = array("q")
        self.steps: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self.ends: Any = ()
        self._table = array("q")
        self._counts: dict[int, int] = defaultdict(int)

    def see(self, start: int, end: int) -> None:
        """Extend the times that the record covers."""
        self.first = start if self.first < 0 else min(self.first, start)
        self.last = max(self.last, end)

    def add(self, tensor: int, ready: int, start: int, end: int) -> None:
        """Add an operation; its columns are those of ``operations``."""
        self._table.extend((tensor, self._counts[tensor], ready, start, end))
        self._counts[tensor] += 1

    @functools.cached_property
    def operations(self) -> Operations:
        """The operations, in the order of their execution."""
        found: Operations = np.frombuffer(self._table, _OPERATION).view(np.recarray)
        return found

    @functools.cached_property
    def inside(self) -> Operations:
        """The operations in the analysed part."""
        own = self.operations
        found: Operations = own[(own.start >= self.first) & (own.end <= self.last)]
        return found

    @functools.cached_property
    def blocked(self) -> tuple[Integers, Integers]:
        """Starts and ends of the times in which a thread was blocked."""
        pairs = np.frombuffer(self.synchronize, np.int64).reshape(-1, 2)
        return _union(pairs[:, 0], pairs[:, 1])

    @functools.cached_property
    def busy(self) -> tuple[Integers, Integers]:
        """Starts and ends of the times in which an operation ran."""
        return _union(self.operations.start, self.operations.end)

    @functools.cached_property
    def blocked_until(self) -> Callable[[Any], Any]:
        """Return how long, until a time, a thread was blocked."""
        times, blocked = np.stack(self.blocked, axis=1), np.diff(self.blocked, axis=0)[0]
        before = np.stack([np.zeros_like(blocked), blocked], axis=1).ravel().cumsum()
        return lambda time: np.interp(time, times.ravel(), before) if len(times) else 0 * time


def _union(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Return the union of intervals as disjoint intervals in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > ends[:-1])
    return starts[new], ends[np.append(new[1:], True)]


class Record:
    """The Chrome trace events of a file, by rank: an array, or an object with ``traceEvents``.

    Attributes:
        events: the number of events read so far.
        problem: why there are no more events, or not all of them count; empty: neither is so.
        ranks: the record of each rank that has events.
        tensors: by the row and name of each tensor (the names of unnamed operations count as one):
            its number, the largest number of bytes of its operations, and the most that a rank has
            sent in one of them; 0: unknown.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.events = 0
        self.problem = ""
        self.ranks: dict[int, RankRecord] = defaultdict(RankRecord)
        self.tensors: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._rows: dict[Any, str] = {}
        self._ready: dict[Any, int] = {}
        self._blocked: dict[Any, int] = {}
        if os.path.isdir(self.path):
            raise StartError(f"{self.path} is a folder, expected a timeline's file; {_REMEDY}")
        try:
            # A name may be cut in a character; the event is incomplete, then.
            self._file = open(self.path, encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as error:
            raise StartError(f"{self.path}: {error.strerror}; {_REMEDY}") from None

    def parse(self) -> Iterator[Event]:
        """Return the events in the order of the file, as far as they can be read."""
        with self._file:
            text = self._file.read(_CHARACTERS)
            start = _ARRAY.match(text) or _OBJECT.match(text)
            if start is None:
                found = f"starts with {text.strip()[:20]!r}" if text.strip() else "is empty"
                raise StartError(
                    f"{self.path} {found}, expected the JSON of Chrome trace events; {_REMEDY}"
                )
            position = start.end()
            while True:
                position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
                if text.startswith("]", position):
                    return
                try:
                    event, position = _decode(text, position)
                except ValueError:
                    more = ""
                    if len(text) - position < _CHARACTERS:
                        more = self._file.read(_CHARACTERS)
                    if not more:
                        self._explain(text[position : position + 2 * _CHARACTERS])
                        return
                    text, position = text[position:] + more, 0
                    continue
                if not isinstance(event, dict):
                    self._explain(text[position:])
                    return
                self.events += 1
                yield event

    def _explain(self, rest: str) -> None:
        if len(rest) < _CHARACTERS and (not rest or rest.startswith("{")):
            what = f"{self.path} is cut off (was the job killed?)"
        else:
            what = f"{self.path} is damaged"
        self.problem = f"{what}: what follows counts its first {self.events} events"

    def read(self) -> None:
        """Add the events of the file."""
        for event in self.parse():
            phase = event.get("ph")
            try:
                if phase == "X":
                    self._complete(event)
                elif phase == "M":
                    self._metadata(event)
                elif phase == "b" and event["name"] == timeline.SYNCHRONIZE:
                    self._blocked[event["id"]] = event["ts"]
                elif phase == "e" and event["name"] == timeline.SYNCHRONIZE:
                    start = self._blocked.pop(event["id"])
                    self._complete({**event, "ts": start, "dur": event["ts"] - start})
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                continue  # an event of another program
        self.ranks = {rank: own for rank, own in sorted(self.ranks.items()) if own.first >= 0}

    def _metadata(self, event: Event) -> None:
        name = event["args"].get("name")
        if event["name"] == "thread_name":
            self._rows[event["tid"]] = str(name)
        elif event["name"] == "process_name" and "job" in event["args"]:
            self.ranks[_number(event["pid"])].name = str(name)

    def _complete(self, event: Event) -> None:
        name, start, thread = event["name"], _number(event["ts"]), event["tid"]
        end, rank = start + _number(event["dur"]), self.ranks[_number(event["pid"])]
        rank.see(start, end)
        args = event["args"]
        if name.startswith(timeline.NEGOTIATE):
            self._ready.setdefault(thread, start)
        elif "tensors" in args:  # an operation, and not a part of one
            nbytes, sent = _number(args["bytes"]), _number(args.get("sent", 0))
            key = self._rows.get(thread, ""), _WITHOUT_NAME.sub(".noname.*", args["tensor"])
            number, most, most_sent = self.tensors.get(key, (len(self.tensors), 0, 0))
            self.tensors[key] = number, max(most, nbytes), max(most_sent, sent)
            rank.add(number, self._ready.pop(thread, -1), start, end)
        elif name == timeline.SYNCHRONIZE:
            rank.synchronize.extend((start, end))
        elif name == timeline.STEP:
            rank.steps[args["exchange"]].append(end)


def _number(value: Any) -> int:
    """Return a time, a size or a rank as a whole number that arrays and floats can hold."""
    number = int(value)
    if not 0 <= number < _LARGEST:
        raise ValueError(value)
    return number
