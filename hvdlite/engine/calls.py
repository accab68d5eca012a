"""Calls without a name: the ranks pair them by their number, and compare where they were made.

The first unnamed allreduce of a rank belongs to the first one of the others. A program that calls
in another order on each rank gets wrong results by this rule. So each call carries its place, the
lines of the program that led to it, which is compared with the rest of the operation. Equal places
cost nothing. Where they differ, `agreement.decide` sees the places of all ranks: a root and the
others may call from two branches, which one warning mentions, and calls that cross fail.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

# The lines that make up a place: that of the call, and those that called its function. Helpers that
# make the call for their callers are common, and each line more costs 0.1 us a call.
_DEPTH = 3
_MAX_PLACES = 4096

_left_out: tuple[str, ...] = (os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),)
_is_left_out: dict[str, bool] = {}
# By thread, code and instruction; with the code, so that no other code gets its id.
_places: dict[tuple[Any, ...], tuple[Place, list[CodeType]]] = {}
_thread = threading.local()


class Line(NamedTuple):
    """A line of the program; the column tells two calls in one line apart."""

    file: str
    number: int
    column: int | None

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Place:
    """Where a call was made.

    Attributes:
        digest: of the lines and the thread.
        lines: that of the call, then the line that called its function, and so on.
        thread: the name of a thread that the program has started; empty: the main thread, or one
            of a pool, whose threads take any task.
        source: the text of the call; empty: not known.
    """

    digest: bytes
    lines: tuple[Line, ...] = field(compare=False)
    thread: str = field(default="", compare=False)
    source: str = field(default="", compare=False)


class CallReport(NamedTuple):
    """A call as the other ranks see it.

    Attributes:
        agreed: the digest of the place that counts in its stead, see `Calls`.
        before: the place of the call before, of the same kind; None: it is the first, or its
            signature was another one.
        mixture: which calls of two threads are in flight at once; empty: none.
    """

    kind: str
    place: Place
    agreed: bytes
    before: Place | None
    key_before: str
    mixture: str


class Call(str):
    """An unnamed call; as a string the name of its operation.

    ``call + suffix`` is the name of its first operation, if it has several; other ways to make a
    string of it give a plain one.

    Attributes:
        number: of the call among those of its kind.
        agreed: as in `CallReport`; where threads mix, equal on no two ranks.
        before: place, signature and key of the call before.
        mixture: as in `CallReport`.
        key: of its operation; empty: there is none yet.
        whole: the call whose name, with a suffix, this is; None: it is the name itself.
    """

    __slots__ = (
        "agreed",
        "before",
        "calls",
        "key",
        "kind",
        "mixture",
        "number",
        "place",
        "signature",
        "thread",
        "whole",
    )
    agreed: bytes
    before: tuple[Place | None, bytes, str]
    calls: Calls
    key: str
    kind: str
    mixture: str
    number: int
    place: Place
    signature: bytes
    thread: int
    whole: Call | None

    def __add__(self, suffix: str) -> Call:
        made = Call(str(self) + suffix)
        made.whole = self
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def report(self) -> CallReport:
        """Return the call as the other ranks see it."""
        before, signature, key = self.before
        before = before if signature == self.signature else None  # what crosses is refused then
        return CallReport(self.kind, self.place, self.agreed, before, key, self.mixture)


class Calls:
    """The unnamed calls of one engine.

    Where ranks call from different places, all use the lowest rank's place in their digests from
    then on, so that they agree as quickly as if it were one. It replaces this rank's own place
    alone: where calls cross, the places of a pair are exchanged, and still differ.

    Attributes:
        counts: How many there have been of each kind, as the ranks number them.
    """

    def __init__(self, in_flight: Container[str]) -> None:
        self._in_flight = in_flight
        self.counts: Counter[str] = Counter()
        self._last: dict[str, Call] = {}
        self._counting = threading.Lock()
        self._agreed: dict[bytes, bytes] = {}
        self._warned: set[frozenset[tuple[Line, ...]]] = set()
        self._mixed: dict[str, set[threading.Thread]] = {}

    def name(self, kind: str, place: Place | None) -> Call:
        """Return the next call of a kind.

        Args:
            place: None: where this is called.
        """
        place = place or find_place()
        thread = threading.get_ident()
        with self._counting:
            last = self._last.get(kind)
            number = self.counts[kind]
            self.counts[kind] += 1
            self._last[kind] = call = Call(f"{kind}.noname.{number}")
            call.calls, call.kind, call.number = self, kind, number
            call.place, call.thread = place, thread
            call.key, call.signature, call.whole, call.mixture = "", b"", None, ""
            call.agreed = self._agreed.get(place.digest, place.digest)
            if last is None:
                call.before = None, b"", ""
            else:
                call.before = last.place, last.signature, last.key
                if last.thread != thread or self._mixed:
                    call.mixture = self._mixture(kind, place, last, thread)
                    if call.mixture:
                        call.agreed = os.urandom(16)
        return call

    def catch_up(self, everywhere: Iterable[Counter[str]]) -> None:
        """Go on after the calls of all ranks, of which each may have missed some."""
        with self._counting:
            for counts in everywhere:
                self.counts |= counts
            self._last.clear()

    def learn(self, call: Call, reports: Mapping[int, CallReport]) -> bool:
        """Take on what all ranks have found to be one call, made at different places.

        Returns:
            Whether lines part here for the first time.
        """
        own, places = call.place.digest, {rank: report.place for rank, report in reports.items()}
        lowest = reports[min(reports)].agreed
        if len(set(places.values())) == 1 or own == lowest:
            self._agreed.pop(own, None)
        # A place that is replaced by another one replaces none itself: otherwise two calls that
        # cross would look alike.
        elif own not in self._agreed.values() and lowest not in self._agreed:
            self._agreed[own] = lowest
        call.agreed = self._agreed.get(own, own)
        parts = where_they_part([place.lines for place in places.values()])
        if not parts:
            return False
        # The outermost: one branch may contain many calls.
        parting = frozenset(place.lines[parts[-1] :][:1] for place in places.values())
        is_new = parting not in self._warned
        self._warned.add(parting)
        return is_new

    def _mixture(self, kind: str, place: Place, last: Call, thread: int) -> str:
        """Say which threads have calls in flight at once, or have had."""
        mixed = {each for each in self._mixed.get(kind, ()) if each.is_alive()}
        overlap = last.thread != thread and last.key in self._in_flight
        if overlap:
            own = threading.current_thread()  # which makes threads of others known
            mixed.update(each for each in threading.enumerate() if each.ident == last.thread)
            mixed.add(own)
        # They would go on in an order of chance, even if one ends: which one differs between ranks.
        self._mixed[kind] = mixed
        if not overlap and mixed <= {threading.main_thread()}:
            del self._mixed[kind]
            return ""
        names = ", ".join(sorted(repr(each.name) for each in mixed))
        where = place.lines[0] if place.lines else "no line of the program"
        return f"threads {names}, one of them at {where}"


def find_place() -> Place:
    """Return the place of the call into hvdlite that has led here."""
    try:
        key: list[Any] = [_thread.name]
    except AttributeError:
        key = [_name_thread()]
    frame: FrameType | None = sys._getframe(2)  # this function's caller is hvdlite's, too
    depth = 0
    while frame is not None and depth < _DEPTH:
        code = frame.f_code
        is_left_out = _is_left_out.get(code.co_filename)
        if is_left_out is None:
            is_left_out = _is_left_out[code.co_filename] = not _counts(code.co_filename)
        if not is_left_out:
            depth += 1
            key.append(id(code))  # to hash code itself takes longer than all the rest
            key.append(frame.f_lasti)
        frame = frame.f_back
    found = _places.get(tuple(key))
    return found[0] if found is not None else _remember(key)


def place_of(frames: Iterable[tuple[str, int]]) -> Place:
    """Return a place that the interpreter's stack does not tell.

    Args:
        frames: files and numbers of lines, the call's first.
    """
    kept = (Line(os.path.basename(file), number, None) for file, number in frames if _counts(file))
    return _place(tuple(itertools.islice(kept, _DEPTH)), "", "")


def leave_out(folder: str) -> None:
    """Leave the files in a folder out of the places of calls, as those of hvdlite."""
    global _left_out
    _left_out = (*_left_out, os.path.join(folder, ""))
    _is_left_out.clear()


def where_they_part(stacks: Sequence[tuple[Line, ...]]) -> list[int]:
    """Return where the lines of places differ: 0 is that of the call, 1 that of its caller."""
    found = enumerate(itertools.zip_longest(*stacks))
    return [depth for depth, lines in found if len(set(lines)) > 1]


def _name_thread() -> str:
    thread = threading.current_thread()
    runs = getattr(getattr(thread, "_target", None), "__module__", "")
    is_of_pool = type(thread) is not threading.Thread or runs.startswith("concurrent.")
    name = _thread.name = "" if is_of_pool else thread.name
    return name


def _remember(key: list[Any]) -> Place:
    codes, lines, source = list[CodeType](), list[Line](), ""
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        code = frame.f_code
        if id(code) not in key[1::2] or len(codes) == _DEPTH:
            continue
        first, last, begin, end = _position(code, frame.f_lasti) or [None] * 4
        # Without its folder, which may differ between hosts.
        lines.append(Line(os.path.basename(code.co_filename), first or number, begin))
        if not codes and first and last and begin is not None:
            source = _source(code.co_filename, range(first, last + 1), begin, end)
        codes.append(code)
    place = _place(tuple(lines), key[0], source)
    if len(_places) >= _MAX_PLACES:  # `exec`, perhaps, which makes new code each time
        _places.clear()
        _is_left_out.clear()
    _places[tuple(key)] = place, codes
    return place


def _counts(file: str) -> bool:
    return not file.startswith(_left_out)


def _place(lines: tuple[Line, ...], thread: str, source: str) -> Place:
    digest = hashlib.blake2b(repr((lines, thread)).encode(), digest_size=16).digest()
    return Place(digest, lines, thread, source)


def _position(code: CodeType, at: int) -> Sequence[int | None] | None:
    """Return first and last line, first and last column; None before Python 3.11."""
    positions = getattr(code, "co_positions", None)
    return positions and next(itertools.islice(positions(), at // 2, None))


def _source(file: str, numbers: Iterable[int], begin: int, end: int | None) -> str:
    """Return the text of a call, as far as it can be had."""
    lines = [linecache.getline(file, number).encode() for number in numbers]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(line.strip() for line in lines).decode(errors="replace")
