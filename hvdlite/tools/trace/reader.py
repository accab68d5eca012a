"""Read the events of a trace file, one after the other, in bounded memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from hvdlite.errors import StartError

Event = dict[str, Any]

_CHARACTERS = 2**20  # read at once; no event is longer
_BETWEEN = re.compile(r"[\s,]*")
_OBJECT = re.compile(r'\s*\{.*?"traceEvents"\s*:\s*\[', re.DOTALL)
_ARRAY = re.compile(r"\s*\[")
_REMEDY = "hvdliterun --timeline-filename FILE records one"
_decode = json.JSONDecoder().raw_decode


class TraceReader:
    """The Chrome trace events of a file: an array, or an object with ``traceEvents``.

    Attributes:
        events: the number of events read so far.
        problem: why there are no more events, if not because the file is complete; else empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.events = 0
        self.problem = ""
        if os.path.isdir(self.path):
            raise StartError(f"{self.path} is a folder, expected a timeline's file; {_REMEDY}")
        try:
            # A name may be cut in a character; the event is incomplete, then.
            self._file = open(self.path, encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as error:
            raise StartError(f"{self.path}: {error.strerror}; {_REMEDY}") from None

    def __iter__(self) -> Iterator[Event]:
        """Return the events in the order of the file."""
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
