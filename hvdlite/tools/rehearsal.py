"""Rehearsal: planted faults, to see what a job does about them.

The environment variable HVDLITE_REHEARSE has one fault or several, which docs/guides/elastic.md
("Rehearse a failure") explains; `hvdlite.base.observers` has the points::

    kill:rank=1,step=7,point=exchange;delay:rank=0,step=9,seconds=2

The thread that gets to the point raises, sleeps or ends its rank there.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import IO, Any

from hvdlite.base import observers
from hvdlite.errors import SettingsError
from hvdlite.observe import status

VARIABLE = "HVDLITE_REHEARSE"
_OF_A_ROUND = ("meet", "exchange", "confirm", "deliver", "delivered")
POINTS = ("start", *_OF_A_ROUND, "recover", "form", "checkpoint", "time")
_CORRUPTIBLE = ("exchange", "checkpoint")

# The faults of this rank that have not come, and how often, in each step, it has got to theirs.
_left: list[Fault] = []
_counts: Counter[tuple[Fault, int]] = Counter()


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the text that describes it in HVDLITE_REHEARSE."""

    action: str
    rank: int = 0
    step: int = 0  # from 1; 0: any
    point: str = "exchange"
    count: int = 1
    seconds: float = 5.0
    after: float = 0.0
    value: float = math.nan
    name: str = ""  # of what is corrupted; empty: the first gradient that leaves
    text: str = field(default="", compare=False)

    @property
    def corrupts_exchange(self) -> bool:
        """Return whether it changes what the rank contributes to an exchange."""
        return self.action == "corrupt" and self.point == "exchange"

    def is_at(self, point: str, step: int, thing: Any) -> bool:
        """Return whether it is for an observer's point in a step, and for the operation there."""
        if self.step not in (0, step):
            return False
        if not self.corrupts_exchange:
            return self.point == point
        # Small contributions leave before the ranks have agreed.
        return point == "submit" and bool(thing.contribution(self.name))


def parse(text: str, ranks: int | None = None) -> list[Fault]:
    """Return the faults that a value of HVDLITE_REHEARSE describes.

    Raises:
        SettingsError: It cannot be read, or names a rank that does not exist.
    """
    return [_parse_one(each.strip(), ranks) for each in text.split(";") if each.strip()]


def _parse_one(text: str, ranks: int | None) -> Fault:
    action, _, rest = text.partition(":")
    values = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(Fault)[1:-1]}
    options: dict[str, Any] = {}
    try:
        for name, value in values.items():
            options[name.strip()] = kinds[name.strip()](value.strip())
        fault = Fault(action.strip(), **options, text=text)
    except (KeyError, ValueError):
        fault = Fault("")
    is_known = fault.action in _ACTIONS and fault.point in POINTS
    numbers = fault.rank, fault.step, fault.count - 1, fault.seconds, fault.after
    problem = ""
    if not is_known or not all(0 <= each < math.inf for each in numbers):
        problem = (
            ", expected for example kill:rank=1,step=7,point=exchange (actions: "
            f"{', '.join(_ACTIONS)}; then {', '.join(kinds)}; points: {', '.join(POINTS)})"
        )
    elif fault.action == "corrupt" and fault.point not in _CORRUPTIBLE:
        problem = (
            f": there are no data to corrupt at the point {fault.point!r}, expected "
            f"{' or '.join(_CORRUPTIBLE)}"
        )
    elif not fault.corrupts_exchange and not {"value", "name"}.isdisjoint(options):
        problem = ": value and name are for corrupt at the point 'exchange'; leave them out"
    elif ranks is not None and fault.rank >= ranks:
        problem = f", expected a rank from 0 to {ranks - 1}"
    if problem:
        raise SettingsError(f"{VARIABLE}: found {text!r}{problem}")
    return fault


def plant(environment: Mapping[str, str], rank: int, ranks: int) -> None:
    """Plant the faults of a rank, by its number at the start; none where the job starts again."""
    global _left
    is_first = environment.get("HVDLITE_RESTART", "0") == "0"
    planned = parse(environment.get(VARIABLE, ""), ranks) if is_first else []
    faults = [fault for fault in planned if fault.rank == rank]
    observers.remove(_observe)
    atexit.unregister(_tell_what_is_left)
    if faults:
        observers.add(_observe)
        atexit.register(_tell_what_is_left)
    _left = faults
    _counts.clear()
    for fault in faults:
        if fault.point == "time":
            timer = threading.Timer(fault.after, _happen, [fault])
            timer.daemon = True
            timer.start()


def _happen(fault: Fault, thing: Any = None) -> None:
    _left.remove(fault)
    _ACTIONS[fault.action](fault, thing)


def _tell_what_is_left() -> None:
    for fault in _left:
        _tell(fault, f"has ended, after {status.steps()} steps, before {fault.text!r}")


def _observe(point: str, *about: Any) -> None:
    """Have the faults come that are planted where this rank gets to."""
    step = status.steps() + 1
    for thing in about[1] if point == "submit" else [next(iter(about), None)]:
        for fault in [each for each in _left if each.is_at(point, step, thing)]:
            _counts[fault, step] += 1
            if _counts[fault, step] == fault.count:
                _happen(fault, thing)


def _corrupt(fault: Fault, thing: Any) -> None:
    if not fault.corrupts_exchange:
        _flip_bit(fault, thing)
        return
    name = thing.contribution(fault.name)
    thing.corrupt(name, fault.value)
    step = status.steps() + 1
    _tell(fault, f"set the first entry of {name!r} to {fault.value:g} in step {step}")


def _stop(fault: Fault, thing: Any) -> None:
    resume = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", resume], stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(fault: Fault, thing: Any) -> None:
    raise RuntimeError(f"planted by {VARIABLE}: {fault.text}")


def _flip_bit(fault: Fault, path: Any) -> None:
    with open(path, "r+b") as file:
        position = _middle(file)
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    _tell(fault, f"flipped a bit of the new checkpoint, at byte {position}")


def _middle(file: IO[bytes]) -> int:
    """Return the position of the middle byte, in a zip file that of the data of its largest member.

    Other bytes of a zip file are in no checksum.
    """
    if not zipfile.is_zipfile(file):
        return os.fstat(file.fileno()).st_size // 2
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda member: member.compress_size)
    file.seek(largest.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))  # the lengths of what follows
    return file.tell() + int(name + extra) + largest.compress_size // 2


def _tell(fault: Fault, text: str) -> None:
    print(f"hvdlite: rank {fault.rank} {text}, as {VARIABLE} says", file=sys.stderr, flush=True)


_ACTIONS: dict[str, Callable[[Fault, Any], object]] = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "delay": lambda fault, _: time.sleep(fault.seconds),
    "raise": _raise,
    "corrupt": _corrupt,
}
