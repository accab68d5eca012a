"""A script as a job of ``hvdliterun``, for the commands that run it several times."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hvdlite.launch import programs
from hvdlite.launch.cli import check
from hvdlite.launch.programs import Ended
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
    """Return the command that runs a script; refuse one that is not there."""
    command = [*([sys.executable] if script.endswith(".py") else []), script, *arguments]
    check(command, os.environ)
    return command


def run(
    title: str,
    options: Sequence[str],
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    timeout: float = math.inf,
) -> Ended:
    """Run a command by ``hvdliterun`` with options, and print each minute that it still runs.

    The code that it returns is the one that a shell would.
    """
    ended = programs.run(
        [sys.executable, "-m", "hvdlite.launch", *options, *command],
        timeout,
        end=subprocess.Popen.terminate,  # hvdliterun ends its ranks
        look=lambda seconds: print(f"{title}: running for {seconds:.0f} s", file=sys.stderr),
        period=_SECONDS_BETWEEN_NEWS,
        env={**os.environ, **(variables or {})},
    )
    return ended if ended.code is None else ended._replace(code=shell_code(ended.code))
