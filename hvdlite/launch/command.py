"""The user's command, checked once before it is started N times."""

from __future__ import annotations

import os
import re
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


_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?t?)?")
# Python's options that end the list of its options, and those that take a value.
_PROGRAM, _VALUED = "cm", "WX"


def for_horovod(command: Sequence[str]) -> list[str]:
    """Have a Python command run with hvdlite for everything it imports from horovod.

    ``python -u train.py 3`` becomes ``python -u -m hvdlite.horovod train.py 3``.

    Raises:
        LaunchError: the command is not Python with a script, a module or code.
    """
    python, *arguments = command
    remedy = (
        "give python and a script, e.g. hvdliterun --horovod -np 2 python train.py, or call "
        "`python -m hvdlite.horovod train.py` in your own program"
    )
    if not _PYTHON.fullmatch(os.path.basename(python)):
        raise LaunchError(f"--horovod: {python} is not Python; {remedy}")
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        flags, option = _letters(arguments[position])
        rest = arguments[position + 1 :]
        if option[:1] in tuple(_PROGRAM):
            flags_before = [f"-{flags}"] if flags else []
            value = [option[1:]] if option[1:] else rest[:1]
            after = rest if option[1:] else rest[1:]
            if not value:
                break
            before = [*arguments[:position], *flags_before]
            return [python, *before, "-m", "hvdlite.horovod", f"-{option[0]}", *value, *after]
        if arguments[position] in ("-", "--"):
            break
        position += 2 if option in (*_VALUED, "--check-hash-based-pycs") else 1
    script = arguments[position : position + 1]
    if not script or script[0].startswith("-"):
        raise LaunchError(f"--horovod: found no script, -m or -c in {' '.join(command)}; {remedy}")
    return [python, *arguments[:position], "-m", "hvdlite.horovod", *arguments[position:]]


def _letters(argument: str) -> tuple[str, str]:
    """Split ``-um`` into the flags ``u`` and the option ``m`` that takes a value, if one does."""
    if argument.startswith("--"):
        return "", argument
    for index, letter in enumerate(argument[1:], start=1):
        if letter in _PROGRAM + _VALUED:
            return argument[1:index], argument[index:]
    return argument[1:], ""


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
