"""``hvdlite rehearse``: what a script does about failures, one job for each of them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hvdlite.errors import SettingsError, StartError
from hvdlite.launch.cli import check
from hvdlite.tools import rehearsal
from hvdlite.tools.cli.arguments import positive

HELP = "plant failures in a script, and see what becomes of the job"
_LAST_LINES = 15
_TOLD = ("hvdliterun: ", "hvdlite: ")  # the beginnings of lines for the user
# Parts of further lines for the user, which are logged without such a beginning.
_LOGGED = (
    "in the same step, after",
    "left out on all ranks",
    "NotFiniteError: ",
    "loaded the generation before it",
)
EXAMPLES = """\
examples:
  hvdlite rehearse -np 4 --elastic train.py --epochs 1
  hvdlite rehearse -np 2 --restarts 1 --step 100 train.py
  hvdlite rehearse -np 4 --elastic --fault "kill:rank=1,step=7;kill:rank=2,step=7" train.py
  hvdlite rehearse -np 2 --fault corrupt:rank=1,step=7 train.py

Without --fault: an undisturbed run, the death of the last rank and that of rank 0 in step --step,
and a rank that stops for 5 seconds there. Steps are those of a DistributedOptimizer or a
DistributedGradientTape. What a fault may be is in the guide to elastic training. Options come
before SCRIPT.
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        fault: as in HVDLITE_REHEARSE; empty: none.
        code: the exit code; None: it was ended because it took too long.
        seconds: its wall time.
        told: the lines that hvdlite and hvdliterun have printed.
    """

    fault: str
    code: int | None
    seconds: float
    told: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite rehearse``."""
    parser.description = (
        "Run a training script once for each failure, planted in one of its ranks, and print what "
        "became of the job: its exit code, its time, and what its user was told."
    )
    add = parser.add_argument
    add("-np", type=positive, default=2, metavar="N", help="number of ranks (%(default)s)")
    add("--elastic", action="store_true", help="as for hvdliterun: go on without a rank")
    add("--restarts", type=positive, metavar="N", help="as for hvdliterun: start again")
    add("--step", type=positive, default=3, metavar="S", help="of the failures (%(default)s)")
    add(
        "--fault",
        type=_fault,
        action="append",
        metavar="FAULT",
        help="plant this one, e.g. kill:rank=1,step=7; may be given several times",
    )
    add("--timeout", type=positive, default=600, metavar="S", help="seconds per job (%(default)s)")
    add("--json", action="store_true", help="print JSON")
    add("script", metavar="SCRIPT", help="a Python script, or a program")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")


def _fault(text: str) -> str:
    try:
        rehearsal.parse(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite rehearse``; return 0 if all jobs have ended well, and 1 otherwise.

    Raises:
        StartError: a mistake on the command line.
    """
    is_python = options.script.endswith(".py")
    command = [*([sys.executable] if is_python else []), options.script, *options.args]
    check(command, os.environ)
    try:
        for fault in options.fault or ():
            rehearsal.parse(fault, options.np)
    except SettingsError as error:
        raise StartError(str(error)) from None
    outcomes = []
    for fault in options.fault or default_faults(options.np, options.step):
        outcomes.append(_run(fault, command, options))
        if not options.json:
            print(describe(outcomes[-1]), flush=True)
        if not fault and outcomes[0].code != 0:
            raise StartError("the job fails without a fault, so there is nothing to rehearse")
    if options.json:
        document = {"command": shlex.join(command), "ranks": options.np}
        print(json.dumps({**document, "results": [asdict(each) for each in outcomes]}, indent=2))
    return int(any(outcome.code != 0 for outcome in outcomes))


def default_faults(ranks: int, step: int) -> list[str]:
    """Return the failures that are planted if the user names none; the first is none."""
    last = ranks - 1
    return [
        "",
        *dict.fromkeys(f"kill:rank={rank},step={step}" for rank in (last, 0)),
        f"stop:rank={last},step={step},seconds=5",
    ]


def describe(outcome: Outcome) -> str:
    """Return the lines for an outcome."""
    ended = "timed out" if outcome.code is None else f"exit code {outcome.code}"
    title = f"{outcome.fault or 'no fault'}: {ended}, {outcome.seconds:.1f} s"
    return "\n".join([title, *(f"    {line}" for line in outcome.told)])


def _run(fault: str, command: Sequence[str], options: argparse.Namespace) -> Outcome:
    words = [sys.executable, "-m", "hvdlite.launch", "-np", str(options.np)]
    words += ["--elastic"] if options.elastic else []
    words += ["--restarts", str(options.restarts)] if options.restarts else []
    environment = {**os.environ, rehearsal.VARIABLE: fault}
    # Files, because a pipe would stay open as long as anything that the job has left behind.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.monotonic()
        process = subprocess.Popen(
            [*words, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        code: int | None = None
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                process.terminate()  # hvdliterun ends the job
                process.wait()
        seconds = time.monotonic() - start
        errors.seek(0)
        lines = errors.read().splitlines()
    told = [
        line for line in lines if line.startswith(_TOLD) or any(part in line for part in _LOGGED)
    ]
    if code and not fault:
        told = lines[-_LAST_LINES:]
    return Outcome(fault, code, seconds, told)
