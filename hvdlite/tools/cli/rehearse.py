"""``hvdlite rehearse``: what a script does about failures, one job for each of them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.errors import SettingsError, StartError
from hvdlite.tools import rehearsal
from hvdlite.tools.cli import script
from hvdlite.tools.cli.arguments import positive

HELP = "plant failures in a script, and see what becomes of the job"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite rehearse``."""
    parser.description = (
        "Run a training script once for each failure, planted in one of its ranks, and print what "
        "became of the job: its exit code, its time, and what its user was told."
    )
    add = parser.add_argument
    add("-np", "-n", type=positive, default=2, metavar="N", help="number of ranks (%(default)s)")
    add("--elastic", action="store_true", help="as for hvdliterun: go on without a rank")
    add("--restarts", type=positive, metavar="N", help="as for hvdliterun: start again")
    add("--step", type=positive, default=3, metavar="S", help="of the failures (%(default)s)")
    add(
        "--fault",
        action="append",
        metavar="FAULT",
        help="plant this one, e.g. kill:rank=1,step=7; may be given several times",
    )
    add("--timeout", type=positive, default=600, metavar="S", help="seconds per job (%(default)s)")
    add("--json", action="store_true", help="print JSON")
    script.add_arguments(parser)


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite rehearse``; return 0 if all jobs have ended well, and 1 otherwise."""
    command = script.command_of(options.script, options.args)
    try:
        for fault in options.fault or ():
            rehearsal.parse(fault, options.np)
    except SettingsError as error:
        raise StartError(str(error)) from None
    results = []
    last, at = options.np - 1, f"step={options.step}"
    deaths = dict.fromkeys(f"kill:rank={rank},{at}" for rank in (last, 0))
    for fault in options.fault or ["", *deaths, f"stop:rank={last},{at},seconds=5"]:
        results.append(_run(fault, command, options))
        if not options.json:
            print(describe(results[-1]), flush=True)
        if not fault and results[0]["code"] != 0:
            raise StartError("the job fails without a fault, so there is nothing to rehearse")
    if options.json:
        document = {"command": shlex.join(command), "ranks": options.np, "results": results}
        print(json.dumps(document, indent=2))
    return int(any(result["code"] != 0 for result in results))


def describe(result: Mapping[str, Any]) -> str:
    """Return the lines for a job."""
    code = result["code"]
    ended = "timed out" if code is None else f"exit code {code}"
    title = f"{result['fault'] or 'no fault'}: {ended}, {result['seconds']:.1f} s"
    return "\n".join([title, *(f"    {line}" for line in result["told"])])


def _run(fault: str, command: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run the job with a fault, and return what became of it, with what its user was told."""
    words = ["-np", str(options.np)]
    words += ["--elastic"] if options.elastic else []
    words += ["--restarts", str(options.restarts)] if options.restarts else []
    job = script.run(
        f"hvdlite rehearse: {fault or 'no fault'}",
        words,
        command,
        variables={rehearsal.VARIABLE: fault},
        timeout=options.timeout,
    )
    lines = job.err.splitlines()
    told = [
        line for line in lines if line.startswith(_TOLD) or any(part in line for part in _LOGGED)
    ]
    if job.code and not fault:
        told = lines[-script.LAST_LINES :]
    return {"fault": fault, "code": job.code, "seconds": job.seconds, "told": told}
