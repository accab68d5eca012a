"""Rehearsal: planted faults, to see what a job does about them.

The environment variable HVDLITE_REHEARSE has one fault or several, separated by semicolons::

    kill:rank=1,step=7,point=exchange;delay:rank=0,step=9,seconds=2

============  =====================================================================
action        what the rank does
============  =====================================================================
``kill``      it ends at once, as by SIGKILL
``stop``      it stops for ``seconds`` (default 5), as by SIGSTOP
``delay``     the thread that gets to the point sleeps for ``seconds`` (default 5)
``raise``     the thread raises a RuntimeError
============  =====================================================================

Faults come in the first run of a job that starts again (``hvdliterun --restarts``). A rank has the
number that it had at the start. A step is an optimizer's, from 1; without one, the
fault comes in the first step in which the rank gets to the point ``count`` times (default 1).

==============  ===================================================================
point           the rank is about to
==============  ===================================================================
``start``       leave ``init()``
``meet``        meet the others in a round (`hvdlite.engine.rounds`)
``exchange``    exchange data, on which the ranks have agreed (the default)
``confirm``     confirm an outcome, which it has
``deliver``     deliver an outcome, which all have confirmed
``delivered``   go on with it
``recover``     form the world of the ranks that are left
``checkpoint``  replace the previous checkpoint by one that is complete
``time``        do whatever it does ``after`` seconds from the end of ``init()``
==============  ===================================================================

Outcomes are confirmed, and worlds formed anew, only in jobs that go on without a rank
(``hvdliterun --elastic``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdlite import status
from hvdlite.errors import SettingsError

VARIABLE = "HVDLITE_REHEARSE"
POINTS = (
    "start",
    "meet",
    "exchange",
    "confirm",
    "deliver",
    "delivered",
    "recover",
    "checkpoint",
    "time",
)

#: Called with the name of a point that this rank gets to; None: no fault is planted here.
reach: Callable[[str], object] | None = None


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        action: "kill", "stop", "delay" or "raise".
        rank: Number of the rank at the start.
        step: Number of the step, from 1; 0: any.
        point: One of `POINTS`.
        count: How many times in the step the rank gets to the point before the fault comes.
        seconds: Duration of a stop or a delay.
        after: For the point "time", the seconds from the end of ``init()``.
    """

    action: str
    rank: int = 0
    step: int = 0
    point: str = "exchange"
    count: int = 1
    seconds: float = 5.0
    after: float = 0.0


def parse(text: str) -> list[Fault]:
    """Return the faults that a value of HVDLITE_REHEARSE describes.

    Raises:
        SettingsError: It cannot be read.
    """
    return [_parse_one(each.strip()) for each in text.split(";") if each.strip()]


def _parse_one(text: str) -> Fault:
    action, _, rest = text.partition(":")
    values = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    kinds: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("rank", "step", "count"), int),
        **dict.fromkeys(("seconds", "after"), float),
        "point": str.strip,
    }
    try:
        options = {name.strip(): kinds[name.strip()](text) for name, text in values.items()}
        fault = Fault(action.strip(), **options)
    except (KeyError, ValueError):
        fault = Fault("")
    is_known = fault.action in _ACTIONS and fault.point in POINTS
    numbers = fault.rank, fault.step, fault.count - 1, fault.seconds, fault.after
    if not is_known or min(numbers) < 0:
        names = ", ".join(each.name for each in fields(Fault)[1:])
        raise SettingsError(
            f"{VARIABLE}: found {text!r}, expected for example kill:rank=1,step=7,point=exchange "
            f"(actions: {', '.join(_ACTIONS)}; then {names}; points: {', '.join(POINTS)})"
        )
    return fault


def plant(environment: Mapping[str, str], rank: int) -> None:
    """Plant the faults of this rank, as the environment says; none where the job starts again.

    Raises:
        SettingsError: It cannot be read.
    """
    global reach
    is_first = environment.get("HVDLITE_RESTART", "0") == "0"
    planned = parse(environment.get(VARIABLE, ""))
    faults = [fault for fault in planned if fault.rank == rank and is_first]
    reach = _Planted(faults) if faults else None
    for fault in faults:
        if fault.point == "time":
            timer = threading.Timer(fault.after, _ACTIONS[fault.action], [fault])
            timer.daemon = True
            timer.start()


class _Planted:
    """The faults that are still to come.

    Args:
        faults: Those of this rank.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._counts: Counter[tuple[int, str]] = Counter()

    def __call__(self, point: str) -> None:
        step = status.steps() + 1
        self._counts[step, point] += 1
        for fault in self._faults:
            is_here = fault.point == point and fault.step in (0, step)
            if is_here and self._counts[step, point] == fault.count:
                self._faults.remove(fault)
                _ACTIONS[fault.action](fault)
                return


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault) -> None:
    resume = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", resume], stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _delay(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"planted by {VARIABLE}: {fault}")


_ACTIONS: dict[str, Callable[[Fault], object]] = {
    "kill": _kill,
    "stop": _stop,
    "delay": _delay,
    "raise": _raise,
}
