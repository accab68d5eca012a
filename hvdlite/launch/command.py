"""The user's command, checked once before it is started N times."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from hvdlite.launch.environment import with_own_programs
from hvdlite.launch.errors import NOT_EXECUTABLE, NOT_FOUND, USAGE, LaunchError


def resolve(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and its environment, with a ``python`` that exists.

    Where ``python`` is not on ``PATH`` (an environment that is not activated), it is the one
    that runs the launcher, and the programs beside it are found first.
    """
    path = environment.get("PATH", os.defpath)
    if command[0] == "python" and shutil.which("python", path=path) is None:
        return [sys.executable, *command[1:]], with_own_programs(environment)
    return list(command), dict(environment)


def check(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a command that cannot be started on this host.

    Raises:
        LaunchError: there is no such program (code 127), it is not executable (126), or the
            Python script does not exist (2, as Python itself has it).
    """
    program = command[0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        if os.path.isdir(program):
            raise LaunchError(f"{program} is a folder, not a program", NOT_EXECUTABLE)
        if os.path.exists(program) and os.sep in program:
            raise LaunchError(
                f"{program} is not executable; for a Python script: "
                f"hvdliterun ... python {program}",
                NOT_EXECUTABLE,
            )
        raise LaunchError(f"{program}: command not found", NOT_FOUND)
    if os.path.basename(program).startswith("python") and len(command) > 1:
        script = command[1]
        if script.endswith(".py") and not os.path.exists(script):
            raise LaunchError(f"{script}: no such file", USAGE)
