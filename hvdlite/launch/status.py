"""A report of what the ranks of a job do, for who asks hvdliterun by SIGUSR2 or SIGQUIT."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.errors import ranks_text
from hvdlite.observe.status import ANSWER, FILE, SIGNAL, Pending, process_line

# A rank that waits for others answers within 0.1 s, and one that holds the interpreter never.
_SECONDS = 2.0
_TICK = 0.05
_ANSWER = re.compile(rf"^{ANSWER}(.*)\n", re.M)  # a file's name may have the same word
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*\(most recent call first\):\n", re.M)
# Where the threads of lanes wait for work, or have none.
_IDLE = re.compile(r'/engine/lane\.py", line \d+ in (?:_sleep|_attend)\n')
_IMPORT = re.compile(r'  File "<frozen importlib.*\n')
_OWN = re.compile(rf'(?:  File "{re.escape(os.path.dirname(os.path.dirname(__file__)))}/.*\n)+')
_IN_HVDLITE = re.compile(rf"{_OWN.pattern}|  \.\.\. .*\n")
# The frames that are shown of a deep stack: of hvdlite or a framework, and of the program.
_INNERMOST, _OUTERMOST = 16, 8


def report(folder: str) -> str:
    """Ask all ranks in the server's folder what they do; return waits, and equal stacks once."""
    ranks = _ask(folder)
    if not ranks:
        return (
            "no rank on this host has called hvd.init() yet; a rank on another host prints "
            f"what it does on kill -{SIGNAL.name.removeprefix('SIG')}"
        )
    deadline = time.monotonic() + _SECONDS
    while True:
        contents = {number: path.read_bytes()[size:] for number, (_, path, size) in ranks.items()}
        texts = {number: each.decode(errors="replace") for number, each in contents.items()}
        answers = {number: _answer(text) for number, text in texts.items()}
        silent = [number for number, answer in answers.items() if answer is None]
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(_TICK)
    lines = _waiting(answers)
    if silent:
        pids = ", ".join(str(ranks[number][0]) for number in silent)
        lines.append(
            f"{ranks_text(silent)} (process {pids}): no answer from Python within "
            f"{_SECONDS:.0f} s: in compiled code, or stopped"
        )
    stacks = {number: _stacks(text) for number, text in texts.items()}
    # Where in hvdlite a rank is just now does not matter.
    groups: dict[str, list[int]] = defaultdict(list)
    for number, found in stacks.items():
        groups[_IN_HVDLITE.sub("", found)].append(number)
    for group in groups.values():
        lines += [f"{ranks_text(group)}, most recent call first:", stacks[group[0]]]
    return "\n".join(lines)


def _ask(folder: str) -> dict[int, tuple[int, Path, int]]:
    """Ask all ranks; return each one's process, its file, and the size of that before."""
    ranks = {}
    for path in Path(folder).glob(f"rank.*/{FILE}"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has not begun to write
            line = (text := path.read_bytes()).splitlines(True)[0].decode()
            pid = int(line.split()[1])
            if process_line(pid) == line:
                ranks[int(path.parent.suffix[1:])] = pid, path, len(text)
                os.kill(pid, SIGNAL)
    return dict(sorted(ranks.items()))


def _answer(text: str) -> list[Pending] | None:
    """Return the operations that a rank waits for; None: it has not answered."""
    found = _ANSWER.search(text)
    return None if found is None else [Pending(*each) for each in json.loads(found[1]) or ()]


def _waiting(answers: Mapping[int, Sequence[Pending] | None]) -> list[str]:
    """Say which operations wait on which ranks, and on which they are missing."""
    operations: dict[str, dict[int, Pending]] = defaultdict(dict)
    for rank, answer in answers.items():
        for pending in answer or ():
            operations[pending.name][rank] = pending
    lines = []
    for found in operations.values():
        title = next(iter(found.values())).title
        seconds = max(pending.seconds for pending in found.values())
        members = next(iter(found.values())).members
        others = [rank for rank in members if rank not in found]
        missing = [rank for rank in others if answers.get(rank) is not None]
        silent = [rank for rank in others if answers.get(rank) is None]  # or on another host
        where = [f"missing on {ranks_text(missing)}"] if missing else []
        where += [f"no answer from {ranks_text(silent)}"] if silent else []
        where = where or ["there on all ranks"]
        lines.append(f"{ranks_text(list(found))}: {seconds:.0f} s in {title}, {', '.join(where)}")
    free = [rank for rank, answer in answers.items() if answer == []]
    if free:
        lines.append(f"{ranks_text(free)}: no operation of hvdlite")
    return lines


def _stacks(text: str) -> str:
    """Return the stacks of the main thread and of the threads that are not idle lanes."""
    stacks = _THREAD.split(_ANSWER.split(text)[0])[1:]
    busy = [_shortened(stack) for stack in reversed(stacks) if not _IDLE.search(stack)]
    return "\n  another thread:\n".join(busy) or "  (no stack)"


def _shortened(stack: str) -> str:
    """Return a stack without the machinery of imports, and without the middle if it is deep."""
    frames = _OWN.sub(_ends, _IMPORT.sub("", stack)).rstrip().splitlines()
    left_out = len(frames) - _INNERMOST - _OUTERMOST
    if left_out > 0:
        frames[_INNERMOST:-_OUTERMOST] = [f"  ... {left_out} more"]
    return "\n".join(frames)


def _ends(own: re.Match[str]) -> str:
    """Return the innermost and the outermost of successive frames in hvdlite."""
    frames = own[0].splitlines(keepends=True)
    if len(frames) < 4:
        return own[0]
    return f"{frames[0]}  ... {len(frames) - 2} more in hvdlite\n{frames[-1]}"
