"""Programs that run to their end for what they print."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from math import inf
from tempfile import TemporaryFile
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """The end of a program, and what it has printed; without a code, it took too long."""

    code: int | None
    out: str
    err: str
    seconds: float


def run(
    command: Sequence[str] | str,
    limit: float,
    look: Callable[[float], object] = lambda seconds: None,
    period: float = inf,
    end: Callable[[subprocess.Popen[bytes]], object] = subprocess.Popen.kill,
    **options: Any,
) -> Ended:
    """Run a program for so many seconds at most, and `end` it then, or what it leaves behind.

    Each period, `look` gets the seconds so far; the program ends if it raises.
    """
    # Files, because a pipe would stay open as long as anything that the program leaves behind.
    with TemporaryFile("w+", errors="replace") as out, TemporaryFile("w+", errors="replace") as err:
        options |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        start, code, seconds = time.monotonic(), None, 0.0
        process = subprocess.Popen(command, **options)
        try:
            while code is None and seconds < limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(limit - seconds, period))
                seconds = time.monotonic() - start
                if code is None and seconds < limit:
                    look(seconds)
        finally:
            end(process)
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read(), seconds)


def ask(command: Sequence[str], seconds: float = 60.0) -> tuple[bool, str]:
    """Run a program, which may crash; return whether it succeeded, and its last line."""
    try:
        ended = run(command, seconds)
    except FileNotFoundError:
        return False, f"there is no {command[0]} here"
    except OSError as error:
        return False, f"{command[0]}: {error.strerror}"
    if ended.code is None:
        return False, f"no answer within {seconds:g} s"
    good = ended.code == 0
    lines = (ended.out if good else ended.err).strip().splitlines()
    return good, lines[-1] if lines else f"exit code {ended.code}"
