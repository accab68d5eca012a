"""A script as a job of ``hvdliterun``, for the commands that run it several times."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.launch.cli import check
from hvdlite.launch.rank import shell_code

#: How many lines of a job that failed are shown.
LAST_LINES = 15
_SECONDS_BETWEEN_NEWS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a program")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )


def command_of(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a script.

    Raises:
        StartError: there is no such script or program.
    """
    command = [*([sys.executable] if script.endswith(".py") else []), script, *arguments]
    check(command, os.environ)
    return command


def run(
    title: str,
    options: Sequence[str],
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    timeout: float = math.inf,
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command once, and print each minute that it still runs.

    Args:
        title: of the job, for these lines.
        options: of ``hvdliterun``.
        variables: environment variables beside those of this process.
        timeout: seconds until the job is ended.

    Returns:
        The job, with None as its code if it took too long; and its seconds, with the start.
    """
    # Files, because a pipe would stay open as long as anything that the job has left behind.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdlite.launch", *options, *command],
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        code, seconds = None, 0.0
        try:
            while code is None and seconds < timeout:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(timeout - seconds, _SECONDS_BETWEEN_NEWS))
                seconds = time.monotonic() - start
                if code is None and seconds < timeout:
                    print(f"{title}: running for {seconds:.0f} s", file=sys.stderr, flush=True)
        finally:
            process.terminate()  # hvdliterun ends its ranks
            process.wait()
        output.seek(0)
        errors.seek(0)
        ended: Any = None if code is None else shell_code(code)
        return subprocess.CompletedProcess(command, ended, output.read(), errors.read()), seconds
