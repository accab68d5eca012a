"""Measure what ``hvdliterun --elastic`` adds to a training step in which no rank dies.

``python -m tests.benchmarks.elastic [--np N] [--turns N]`` starts jobs with and without it in
turns. Each trains the models of ``hvdlite bench training`` and prints the median time of its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from hvdlite.bench.workloads import WORKLOADS
from tests.harness import mpirun

_MODELS = {"resnet": 40, "layers": 200, "mlp": 12}  # and the number of steps


def _train() -> None:
    """Print the median seconds of a step of each model, from rank 0."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite.torch import benchmark

    hvd.init()
    torch.set_num_threads(1)
    found = {}
    for name, steps in _MODELS.items():
        batch = WORKLOADS[name].batch
        replica = benchmark.Replica(name, name, batch, hvd.rank(), benchmark.hvdlite)
        replica.broadcast()
        times = []
        for step in range(steps + 5):
            hvd.barrier()
            start = time.perf_counter()
            replica.step()
            if step >= 5:
                times.append(time.perf_counter() - start)
        found[name] = statistics.median(times)
    if hvd.rank() == 0:
        print(json.dumps(found))


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.turns):
        for is_elastic in (False, True):
            extra = ["--elastic"] if is_elastic else []
            command = [sys.executable, "-m", "hvdlite.launch", "-np", str(options.np), *extra]
            job = subprocess.run(
                [*command, sys.executable, "-m", "tests.benchmarks.elastic", "--ranks"],
                env=mpirun.environment(),
                cwd=mpirun.ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
            for model, found in json.loads(job.stdout).items():
                seconds.setdefault((model, is_elastic), []).append(found)
    for model in _MODELS:
        plain, elastic = (statistics.median(seconds[model, each]) for each in (False, True))
        ratios = [b / a for a, b in zip(seconds[model, False], seconds[model, True], strict=True)]
        print(
            f"{model}: {plain * 1e3:.1f} ms a step, with --elastic {elastic * 1e3:.1f} ms; ratio "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    _train() if sys.argv[1:] == ["--ranks"] else main()
