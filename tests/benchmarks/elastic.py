"""Measure what ``hvdliterun --elastic`` adds to a training step in which no rank dies.

``python -m tests.benchmarks.elastic [--np N] [--jobs N] [--turns N]`` starts a job with it and one
without, which take turns of a few steps, so that both meet the same load of the machine. Then it
does so again with new jobs: where processes lie in memory makes a difference, too. The models are
those of ``hvdlite bench training``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

from hvdlite.tools.bench.measurement import order, timed
from hvdlite.tools.bench.workloads import WORKLOADS
from tests.benchmarks.files import median_text
from tests.harness import mpirun

_MODELS = {"resnet": 6, "layers": 60, "mlp": 6}  # and the number of steps in a turn
_WARM_UP = 3


def _serve(models: list[str]) -> None:
    """Train the model that each line on standard input names, for one turn; print the median step.

    Only rank 0 has these lines.
    """
    import torch

    import hvdlite.torch as hvd
    from hvdlite.torch import benchmark

    hvd.init()
    torch.set_num_threads(1)
    replicas = {}
    for name in models:
        batch = WORKLOADS[name].batch
        replicas[name] = benchmark.Replica(name, name, batch, hvd.rank(), benchmark.hvdlite)
        hvd.broadcast_parameters(replicas[name].model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(replicas[name].optimizer, root_rank=0)
    while name := hvd.broadcast_object(sys.stdin.readline().strip() if hvd.rank() == 0 else None):
        times = []
        for _ in range(_MODELS[name]):
            hvd.barrier()
            times.append(timed(replicas[name].step))
        hvd.on_rank_zero(print)(statistics.median(times), flush=True)


@contextlib.contextmanager
def _job(ranks: int, models: list[str], *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), *flags]
    with subprocess.Popen(
        [*command, sys.executable, "-m", "tests.benchmarks.elastic", "--ranks", *models],
        env=mpirun.environment(),
        cwd=mpirun.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.stdin.write("\n")  # Open MPI's mpirun does not pass on that its input has ended
            job.stdin.close()
    assert job.returncode == 0, job.returncode


def _measure(ranks: int, models: list[str], turns: int) -> dict[str, list[float]]:
    """Return the median seconds of a step, without and with ``--elastic``, for each model."""
    found = {}
    with _job(ranks, models) as plain, _job(ranks, models, "--elastic") as elastic:
        for model in models:
            seconds: tuple[list[float], list[float]] = ([], [])
            for turn in range(turns + _WARM_UP):
                for index in order(2, turn):
                    job = (plain, elastic)[index]
                    print(model, file=job.stdin, flush=True)
                    seconds[index].append(float(job.stdout.readline()))
            found[model] = [statistics.median(each[_WARM_UP:]) for each in seconds]
    return found


def main() -> None:
    """Print a line for each model and pair of jobs, and one for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=5, help="pairs of jobs, one after the other")
    parser.add_argument("--turns", type=int, default=10, help="of each job with each model")
    parser.add_argument("--models", default=",".join(_MODELS))
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {model: [] for model in options.models.split(",")}
    for _ in range(options.jobs):
        for model, (plain, elastic) in _measure(options.np, [*ratios], options.turns).items():
            ratios[model].append(elastic / plain)
            print(
                f"{model}: {plain * 1e3:.1f} ms a step, with --elastic {elastic * 1e3:.1f} ms; "
                f"ratio {elastic / plain:.3f}",
                flush=True,
            )
    for model, found in ratios.items():
        print(f"{model}: median ratio {median_text(found, 3)}")


if __name__ == "__main__":
    _serve(sys.argv[2:]) if sys.argv[1:2] == ["--ranks"] else main()
