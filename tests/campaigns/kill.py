"""Kill random ranks at random moments under ``hvdliterun --elastic``: the others go on.

python -m tests.campaigns.kill --runs 100
python -m tests.campaigns.kill --runs 100 --framework arrays --set HVDLITE_SHARED_MEMORY=0
python -m tests.campaigns.kill --runs 100 --framework sets
python -m tests.campaigns.kill --runs 100 --framework spares
python -m tests.campaigns.kill --runs 100 --framework virtual
python -m tests.campaigns.kill --runs 10 --framework virtual-powersgd --ranks 8
python -m tests.campaigns.kill --runs 20 --framework fsdp

FSDP cannot go on: its job ends with an error on every rank that names the death.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tests.campaigns import add_settings, make_parser, succeed
from tests.launch import launcher

RANKS = 4
_SECONDS = 120


class Script(NamedTuple):
    """A program, which takes the number of steps."""

    path: str
    steps: int
    seconds: float  # about as long as they take, from the end of ``init()``
    has_steps: bool = True  # hvdlite counts them, because there is an optimizer
    spares: int = 0
    arguments: tuple[str, ...] = ()  # after the number of steps


SCRIPTS = {
    "step": Script("tests/elastic/recovering.py", 1, 0.1, has_steps=False),
    "arrays": Script("tests/elastic/recovering.py", 12, 0.3, has_steps=False),
    "sets": Script("tests/elastic/adding_sets.py", 60, 0.4, has_steps=False),
    "torch": Script("tests/elastic/training_torch.py", 30, 0.6),
    "ddp": Script("tests/elastic/training_ddp.py", 30, 0.6),
    "tensorflow": Script("tests/elastic/training_tensorflow.py", 30, 2.0),
    "virtual": Script("tests/elastic/virtual_torch.py", 30, 1.0),
    "virtual-powersgd": Script("tests/elastic/virtual_torch.py", 30, 1.2, arguments=("powersgd",)),
    "virtual-tensorflow": Script("tests/elastic/virtual_tensorflow.py", 30, 2.0),
    "spares": Script("tests/elastic/sparing_torch.py", 2, 0.6, spares=1),
    "keras": Script("tests/elastic/training_keras.py", 30, 3.0),
}
_POINTS = ("meet", "exchange", "confirm", "deliver", "delivered")


class Run(NamedTuple):
    """The outcome of a job."""

    left: list[int]  # the ranks at the end, by their numbers at the start
    results: set[str]  # printed by them; one if all is well
    lost: list[float]  # seconds that each recovery took, as rank 0 says
    longer: list[float]  # seconds of the slowest step beyond the median one, if the job tells


def run(
    framework: str,
    faults: Sequence[str],
    ranks: int = RANKS,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Run a job of one of `SCRIPTS`, with planted faults as in HVDLITE_REHEARSE."""
    script = SCRIPTS[framework]
    job = succeed(
        *("-np", ranks, "--elastic", "--spares", script.spares),
        *(sys.executable, script.path, script.steps, *script.arguments),
        env={"HVDLITE_REHEARSE": ";".join(faults), **extra},
        timeout=_SECONDS,
    )
    lines = re.findall(r"^left (\d+): (.*)$", job.stdout, re.MULTILINE)
    lost = re.findall(r"in the same step, after (\S+) s$", job.stderr, re.MULTILINE)
    left = sorted(int(rank) for rank, _ in lines)
    longer = re.findall(r"^longer \d+: (\S+)$", job.stdout, re.MULTILINE)
    results = {result for _, result in lines}
    return Run(left, results, list(map(float, lost)), [max(map(float, longer))] if longer else [])


def run_fsdp(chance: random.Random, ranks: int) -> float:
    """Have a rank die in a job that cannot go on; return how long the last of the others took.

    All of them must end with an error that names the death.
    """
    with tempfile.TemporaryDirectory() as folder:
        victim, seconds = chance.randrange(ranks), chance.uniform(0, 0.5)
        job = launcher.hvdliterun(
            *("-np", ranks, "--elastic", sys.executable, "tests/elastic/dying_fsdp.py"),
            *(victim, seconds, f"{folder}/time"),
            timeout=_SECONDS,
        )
    lost = dict(re.findall(r"^lost (\d+): (\S+) .* (?:died|dead)", job.stdout, re.MULTILINE))
    assert job.returncode, "it went on"
    assert {*map(int, lost)} == {*range(ranks)} - {victim}, job.stdout + job.stderr
    return max(map(float, lost.values()))


def random_faults(chance: random.Random, script: Script, ranks: int = RANKS) -> list[str]:
    """Return one or two deaths, each at a random point of a random step or at a random time."""
    faults = []
    for rank in chance.sample(range(ranks), chance.choice([1, 1, 2])):
        if faults and chance.random() < 0.3:
            moment = "point=recover"
        elif chance.random() < 0.4:
            moment = f"point=time,after={chance.uniform(0, script.seconds):.4f}"
        elif script.has_steps:
            step, count = chance.randint(1, script.steps), chance.choice([1, 1, 2, 3])
            moment = f"step={step},point={chance.choice(_POINTS)},count={count}"
        else:
            moment = f"point={chance.choice(_POINTS)},count={chance.randint(2, 14 * script.steps)}"
        faults.append(f"kill:rank={rank},{moment}")
    return faults


def every_point(ranks: int = 3) -> int:
    """Have each rank of a job of one step die at each point that it gets to; count them."""
    tried = 0
    for rank in range(ranks):
        others = [each for each in range(ranks) if each != rank]
        for point in _POINTS:
            count, reached = 0, True
            while reached:
                count += 1
                found = run("step", [f"kill:rank={rank},point={point},count={count}"], ranks)
                reached = found.left != [*range(ranks)]
                assert not reached or found.left == others, (rank, point, count, found)
                assert found.results == {str(len(found.left))}, (rank, point, count, found)
            print(f"rank {rank} died at each of {count - 1} times at {point!r}", flush=True)
            tried += count - 1
    return tried


def main() -> None:
    """Run the campaign and print what came out."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--framework", choices=[*SCRIPTS, "fsdp"], default="torch")
    parser.add_argument("--ranks", type=int, default=RANKS, help="at the start of each run")
    parser.add_argument("--every", action="store_true", help="instead, each at each point")
    add_settings(parser)
    options = parser.parse_args()
    extra, ranks = dict(options.set), options.ranks
    if options.every:
        print(f"{every_point()} deaths, and the others went on with the right values")
        return
    chance, deaths = random.Random(options.seed), 0
    if options.framework == "fsdp":
        took = [run_fsdp(chance, ranks) for _ in range(options.runs)]
        print(f"{options.runs} of {options.runs} ended with a named error, in {max(took):.2f} s")
        return
    lost, longer, undisturbed = [], [], set()
    if options.framework.startswith("virtual"):  # the same bits as those of one process
        undisturbed = run(options.framework, [], 1, extra).results
    for number in range(options.runs):
        faults = random_faults(chance, SCRIPTS[options.framework], ranks)
        began = time.perf_counter()
        try:
            found = run(options.framework, faults, ranks, extra)
            assert len(found.results | undisturbed) == 1, (found, undisturbed)
            assert len(found.left) >= ranks - len(faults), found
        except AssertionError as error:
            print(f"run {number} with {faults} failed: {error}", flush=True)
            raise SystemExit(1) from None
        lost += found.lost
        longer += found.longer if found.lost else []
        deaths += ranks - len(found.left)
        seconds = time.perf_counter() - began
        print(f"run {number}: {'; '.join(faults)}: left {found.left}, {seconds:.1f} s", flush=True)
    print(f"{options.runs} of {options.runs} ended well; {deaths} deaths")
    for what, values in (("recovery", lost), ("slowest step, beyond the median one", longer)):
        if values:
            median, worst = statistics.median(values), max(values)
            print(f"{what}: median {median:.3f} s, worst {worst:.3f} s")


if __name__ == "__main__":
    main()
