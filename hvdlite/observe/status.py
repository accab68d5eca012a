"""A report of what this process does, on request: each thread's stack, and what it waits for.

The request is SIGUSR2. `faulthandler` writes the stacks in the signal's C handler, also where
compiled code holds the interpreter. Python's handler writes the pending operations as soon as the
main thread runs Python code.

Under hvdliterun both go to a file in the rank's folder, in which `hvdlite.launch.status` finds the
process, too, and which it reads; otherwise to standard error.

Notes of the rank (`protocol.NOTES`) are kept where the process around it finds them when the rank
has died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TextIO

from hvdlite.observe import protocol

SIGNAL = signal.SIGUSR2
FILE = "status"
"""The name of the file in the rank's folder. Its first line is from `process_line`."""
ASKING = "asking"
"""The name of the file by which a rank asks for a report; beside the folders of the ranks."""
ANSWER = "pending "
"""The beginning of the line with the pending operations, in JSON; it follows the stacks."""


class Pending(NamedTuple):
    """An operation that has not ended.

    Attributes:
        name: of the operation and its lane.
        title: the name, and for a bucket its parameters.
    """

    name: str
    title: str
    seconds: float
    members: tuple[int, ...]


# Seconds that a rank waits for the report that it has asked for.
_MOST_WAIT = 3.0

_find: Callable[[], tuple[int, list[Pending]] | None]
_file: TextIO | None = None
_owner = 0  # the process that has installed the handlers
#: The numbers of steps that have ended, by their optimizer.
counts: Counter[Hashable] = Counter()
_last: Hashable = None  # the optimizer that has made the last one


def install(find: Callable[[], tuple[int, list[Pending]] | None]) -> None:
    """Answer requests from now on, unless the program has a handler of its own.

    Only the main thread can install handlers; in another thread it does nothing. Call it again
    after the handlers have been wrapped or unwrapped.

    Args:
        find: returns the rank and its pending operations; None: there is no rank.
    """
    global _find, _file, _owner
    _find = find
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(SIGNAL)
    if current is signal.SIG_DFL:
        signal.signal(SIGNAL, _answer)
    elif current is not _answer:
        return
    if _owner != os.getpid():
        _owner = os.getpid()
        _file = _open()
    # Anew, since `signal.signal` has replaced its handler. Standard error may have been closed, or
    # have no descriptor.
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.unregister(SIGNAL)
        faulthandler.register(SIGNAL, file=_file or sys.stderr, all_threads=True, chain=True)


def count_step(key: Hashable) -> None:
    """Count a step that has ended, for the line that names this rank after its death.

    Args:
        key: of an optimizer, the same in every world.
    """
    global _last
    counts[key] += 1
    _last, _notes()[protocol.STEP] = key, counts[key]


def steps() -> int:
    """Return the number of steps that have ended, of the optimizer that has made the last."""
    return counts[_last]


def note(which: int, number: int) -> None:
    """Change one of the rank's notes, such as `protocol.MET`."""
    _notes()[which] = number


def ask_launcher() -> None:
    """Have hvdliterun report what the ranks do, and wait for that, for a few seconds at most.

    It is for an error that is about to end a job in which some ranks hang. On another host than
    hvdliterun's, and without it, nothing happens.
    """
    asking = _folder() / os.pardir / ASKING
    deadline = time.monotonic() + _MOST_WAIT
    # The main thread does not get to Python's handler as long as the caller's operation goes on.
    answers = _file is not None and threading.current_thread() is threading.main_thread()
    with contextlib.suppress(OSError, ValueError):
        before = os.fstat(_file.fileno()).st_size if _file is not None else 0
        asking.touch()
        while asking.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
            if answers and _file is not None and os.fstat(_file.fileno()).st_size > before:
                answers = False
                _answer(SIGNAL, None)


@functools.cache
def _notes() -> memoryview:
    return protocol.notes(os.environ.get(protocol.NOTES, ""))


os.register_at_fork(after_in_child=_notes.cache_clear)  # it may enter a job of its own


def process_line(pid: int) -> str:
    """Return a line that identifies a process for as long as it lives.

    Raises:
        OSError: it has ended.
    """
    with open(f"/proc/{pid}/stat") as file:
        began = file.read().rpartition(")")[2].split()[19]
    return f"process {pid} {began}\n"


def _folder() -> Path:
    """Return the rank's folder; where it has none, what no file can be in."""
    return Path(os.environ.get(protocol.FOLDER) or os.devnull)


def _open() -> TextIO | None:
    try:
        file = open(_folder() / FILE, "a")  # noqa: SIM115 - for as long as the process
        file.write(process_line(os.getpid()))
        file.flush()
    except OSError:
        return None
    return file


def _answer(number: int, frame: FrameType | None) -> None:
    found = _find() if os.getpid() == _owner else None
    if _file is not None:
        pending = None if found is None else found[1]
        text = f"{ANSWER}{json.dumps(pending)}\n"
    elif found is not None:
        rank, pending = found
        lines = [f"{each.title}, submitted {each.seconds:.0f} s ago" for each in pending]
        text = f"hvdlite: rank {rank} waits for: {'; '.join(lines) or 'no operation'}\n"
    else:
        return
    with contextlib.suppress(OSError, ValueError):
        file = _file or sys.stderr
        file.write(text)
        file.flush()
