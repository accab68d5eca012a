"""Kill a random rank at a random step under ``hvdliterun --restarts 1``: the weights are the same.

python -m tests.campaigns.restarts --runs 20
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import tempfile
import time
from typing import Any

from tests.campaigns import make_parser, succeed
from tests.harness import mpirun

_SCRIPTS = {"torch": "pytorch_mnist.py", "tensorflow": "tensorflow_mnist.py"}
EPOCHS = 4
_STEPS = 23 * EPOCHS  # 1,437 images in batches of 2 x 32
_SECONDS = 180


def train(framework: str, fault: str = "") -> tuple[dict[str, Any], str, float]:
    """Train on two ranks, maybe with a planted fault; return result, stderr, and seconds."""
    example = mpirun.ROOT / "examples" / _SCRIPTS[framework]
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        began = time.perf_counter()
        job = succeed(
            *("-np", 2, "--restarts", 1, sys.executable, example),
            *("--epochs", EPOCHS, "--checkpoint-dir", folder, "--json"),
            env={"HVDLITE_REHEARSE": fault},
            timeout=_SECONDS,
        )
        seconds = time.perf_counter() - began
    return json.loads(job.stdout.splitlines()[-1]), job.stderr, seconds


def compare(framework: str, expected: dict[str, Any], rank: int, step: int) -> float:
    """Train with a death, expect the undisturbed result, and return the seconds."""
    fault = f"kill:rank={rank},step={step + 1}"  # in the exchange after the step
    result, errors, seconds = train(framework, fault)
    line = (
        rf"^hvdliterun: rank {rank} on host \S+ was killed by signal 9 \(SIGKILL\) "
        rf"after step {step}; restart 1 of 1$"
    )
    assert re.search(line, errors, re.MULTILINE), errors
    for key in ("weights_sha256", "test_accuracy", "identical"):
        assert result[key] == expected[key], f"{key}: {result[key]}, expected {expected[key]}"
    return seconds


def main() -> None:
    """Run the campaign and print what came out."""
    parser = make_parser(__doc__, seed=1)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--framework", choices=_SCRIPTS, default="torch")
    options = parser.parse_args()
    numbers = random.Random(options.seed)
    expected, _, undisturbed = train(options.framework)
    times, failures = [], 0
    for run in range(options.runs):
        rank, step = numbers.randrange(2), numbers.randint(1, _STEPS - 1)
        try:
            times.append(compare(options.framework, expected, rank, step))
        except AssertionError as error:
            failures += 1
            print(f"run {run}: rank {rank} killed after step {step}: {error}", flush=True)
    print(f"{options.runs - failures} of {options.runs} runs end as the undisturbed one:")
    print(f"test accuracy {expected['test_accuracy']:.4f}, weights {expected['weights_sha256']}")
    if times:
        lost = [seconds - undisturbed for seconds in times]
        print(f"seconds lost: median {statistics.median(lost):.1f}, worst {max(lost):.1f}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
