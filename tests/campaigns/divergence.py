"""Let one rank's replica part from the others' in every way: all ranks are told, with the name.

python -m tests.campaigns.divergence
python -m tests.campaigns.divergence --framework keras-tensorflow --variant plain set
python -m tests.campaigns.divergence --steps 1000 --quiet fp16 topk powersgd batches join death
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import hvdlite
from hvdlite.world import world
from tests.campaigns import make_parser, succeed

RANKS = 3
_SECONDS = 900
_VICTIMS = {
    "torch": ("tests.campaigns.victims.torch", {}),
    "keras-tensorflow": ("tests.campaigns.victims.keras", {"KERAS_BACKEND": "tensorflow"}),
    "keras-torch": ("tests.campaigns.victims.keras", {"KERAS_BACKEND": "torch"}),
    "tape": ("tests.campaigns.victims.tape", {}),
}
# What hvdliterun gets, for each way to run a job.
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "set": (),
    "elastic": ("--elastic",),
    "virtual": (),
}
_WITHOUT_VIRTUAL = ("keras-torch", "tape")
QUIET = ("fp16", "topk", "powersgd", "batches", "join", "death")
# A victim is small, so that a rotation takes a few steps.
_LAST_PART, _MOST_STEPS = 12, 40


class Victim(Protocol):
    """A model in training on this rank, with its distributed optimizer."""

    def step(self, number: int, samples: int | None = None) -> None:
        """Make a step on data of this rank; with a batch of that size, which weights it."""

    def broadcast(self, root: int) -> None:
        """Give all ranks the weights, and the optimizer's state, of one."""

    def partings(self) -> Mapping[str, Parting]:
        """Return the ways in which this rank can part, after a step."""


class Parting(NamedTuple):
    """A change that one rank makes alone."""

    change: Callable[[], object]
    label: str  # a regular expression that the error's first difference matches
    at_once: bool = False  # it is found in the next step: an option
    follows: bool = False  # weights part with the step after it, and may be found in its place


class Found(NamedTuple):
    """The outcome of a parting."""

    case: str
    steps: int  # from the change to the error


# In the job


def part(
    victim: Victim, name: str, culprit: bool, at: int, error: type[Exception]
) -> tuple[int, str]:
    """Part after a step, and go on until all ranks are told; return the step, and the message."""
    for number in range(1, at + _MOST_STEPS):
        try:
            victim.step(number)
        except error as raised:
            return number, str(raised)
        if number == at and culprit:
            victim.partings()[name].change()
    raise AssertionError(f"{name} after step {at} was not found in {_MOST_STEPS} steps")


def check(message: str, parting: Parting, at: int, number: int) -> None:
    """Require what a message says of a parting."""
    steps = r" \(equal in step (\d+), apart in step (\d+)\)"
    found = re.search(rf"replicas that differ: [^;]*{parting.label}.*{steps}", message)
    assert found, f"expected {parting.label}: {message}"
    since, apart = map(int, found.groups()[-2:])
    assert at < number == apart, (at, number, message)
    last = at + parting.follows
    assert since == at if parting.at_once else since <= last, (at, number, message)
    assert "broadcast is missing" in message or parting.at_once, message


def hunt(framework: str, variant: str, seed: int, cases: int) -> Iterator[Found]:
    """Part in every way (0), or in so many, each with a new victim; in a job."""
    module = importlib.import_module(_VICTIMS[framework][0])
    hvd = module.hvd
    options: dict[str, Any] = {}
    if variant == "set":
        members = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[members])
        options["process_set"] = members
    else:
        hvd.init(**({"virtual_ranks": 2 * RANKS} if variant == "virtual" else {}))
    ranks = [0, 2] if variant == "set" else range(RANKS)
    own = world.rank()  # of this process, also with virtual ranks
    chance = random.Random(seed)
    kinds = [
        (kind, name)
        for kind in module.KINDS
        for name in module.make(kind, {}, is_named=True).partings()
    ]
    chance.shuffle(kinds)
    for kind, name in kinds[: cases or None]:
        culprit, at = chance.choice(ranks), chance.randint(3, _LAST_PART)
        if own not in ranks:
            continue
        victim = module.make(kind, options)
        number, message = part(victim, name, own == culprit, at, hvd.MismatchError)
        check(message, victim.partings()[name], at, number)
        if own == 0:
            yield Found(f"{kind}: {name} on rank {culprit}", number - at)


def stay_quiet(framework: str, hows: Sequence[str], steps: int) -> None:
    """Train in ways that must raise no alarm, one after the other; in a job."""
    module = importlib.import_module(_VICTIMS[framework][0])
    hvd = module.hvd
    hvd.init()
    compression = {
        "fp16": hvd.Compression.fp16,
        "topk": hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.1)),
        "powersgd": hvd.Compression.PowerSGD(2),
    }
    epoch = 25
    for how in hows:
        began = time.perf_counter()
        options = {"compression": compression[how]} if how in compression else {}
        victim = module.make(module.KINDS[0], options)
        for number in range(1, steps + 1):
            victim.step(number, 1 + (number + hvd.rank()) % 5 if how == "batches" else None)
            if how == "join" and number % epoch == 0:
                for more in range(hvd.rank()):  # each rank has more data than the last
                    victim.step(number + more)
                victim.broadcast(hvdlite.join())  # which hvdlite.keras has not
        if hvd.rank() == 0:
            seconds = time.perf_counter() - began
            print(f"{how}: {steps} steps without an alarm; {seconds:.0f} s", flush=True)


# Around the job


def run(framework: str, variant: str, seed: int = 0, cases: int = 0) -> list[Found]:
    """Run a job of `hunt`."""
    arguments = ("--job", variant, "--seed", seed, "--cases", cases)
    output = _launch(framework, VARIANTS[variant], arguments, {})
    return [Found(*json.loads(line)) for line in re.findall(r"^(\[.*\])$", output, re.MULTILINE)]


def run_quietly(framework: str, hows: Sequence[str], steps: int) -> str:
    """Run the jobs of `stay_quiet`: one with a death, and one for all else. Return their output."""
    death = {"HVDLITE_REHEARSE": f"kill:rank=1,step={steps // 2},point=exchange"}
    output = ""
    for is_death, launch, faults in ((False, (), {}), (True, ("--elastic",), death)):
        if names := [how for how in hows if (how == "death") == is_death]:
            output += _launch(framework, launch, ("--steps", steps, "--job", *names), faults)
    return output


def _launch(
    framework: str, launch: Sequence[str], arguments: Sequence[object], extra: Mapping[str, str]
) -> str:
    return succeed(
        *("-np", RANKS, *launch, sys.executable, "-m", __spec__.name if __spec__ else __name__),
        *("--framework", framework, *arguments),
        env={**_VICTIMS[framework][1], **extra},
        timeout=_SECONDS,
    ).stdout


def main() -> None:
    """Run the campaign and print what came out; or be the job."""
    parser = make_parser(__doc__)
    parser.add_argument("--framework", choices=[*_VICTIMS], default="torch")
    parser.add_argument("--variant", nargs="*", choices=[*VARIANTS], default=[*VARIANTS])
    parser.add_argument("--cases", type=int, default=0, help="of each variant; 0: all")
    parser.add_argument("--quiet", nargs="*", choices=QUIET, default=[*QUIET])
    parser.add_argument("--steps", type=int, default=1000, help="without an alarm")
    parser.add_argument("--job", nargs="+", choices=[*VARIANTS, *QUIET], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.job:
        _run_campaign(options)
    elif options.job[0] in QUIET:
        stay_quiet(options.framework, options.job, options.steps)
    else:
        for found in hunt(options.framework, options.job[0], options.seed, options.cases):
            print(json.dumps(found), flush=True)


def _run_campaign(options: argparse.Namespace) -> None:
    for variant in options.variant:
        if variant == "virtual" and options.framework in _WITHOUT_VIRTUAL:
            continue
        began = time.perf_counter()
        found = run(options.framework, variant, options.seed, options.cases)
        for each in found:
            print(f"{options.framework}, {variant}: {each.case}: found after {each.steps} steps")
        seconds, most = time.perf_counter() - began, max(each.steps for each in found)
        print(f"{variant}: all {len(found)} found, in {most} steps or less; {seconds:.0f} s")
    print(run_quietly(options.framework, options.quiet, options.steps), end="")


if __name__ == "__main__":
    main()
