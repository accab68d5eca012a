"""Measure the cost of comparing replicas in each step, beside the steps of one process.

Times are those of one thread on its processor, which other programs do not prolong.

``python -m tests.benchmarks.replicas [--batch 8] [--steps 300] [--threads 1]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvdlite.base.settings import Settings
from hvdlite.tools.bench.workloads import WORKLOADS
from hvdlite.torch.benchmark import Replica, alone
from hvdlite.torch.replicas import make_check


class Cost(NamedTuple):
    """The seconds that a comparison takes in each step, and those of the step without it."""

    slices: Sequence[float]
    all: float  # the first comparison: of everything
    steps: Sequence[float]
    rotation: int  # the number of steps that compare everything
    nbytes: int  # of the weights and the optimizer's state


def measure(workload: str, batch: int, count: int) -> Cost:
    """Train a model, and compare it with nobody before each step: caches are as in a job."""
    made: list[torch.optim.Optimizer] = []

    def wrap(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        made.append(alone(model)[1])
        return model, made[0]

    replica = Replica("alone", workload, batch, 0, wrap)
    replica.step()
    parameters = made[0].param_groups[0]["params"]
    names = {parameter: f"parameter.{n}" for n, parameter in enumerate(parameters)}
    check = make_check(lambda: made[0], names, parameters)
    world, settings = measure, Settings()
    check.begin(world, settings)
    check.end()  # the first exchange, which compares nothing

    def compare() -> None:
        snapshot = check.begin(world, settings)
        assert snapshot is not None
        check.succeed(snapshot.position, snapshot.step)
        check.end()

    everything = _seconds(compare)
    steps, slices = [], []
    for _ in range(count):
        steps.append(_seconds(replica.step))
        slices.append(_seconds(compare))
    nbytes = 2 * sum(parameter.nbytes for parameter in parameters)
    return Cost(slices, everything, steps, check.rotation.length, nbytes)


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for workload in arguments.workload:
        cost = measure(workload, arguments.batch, arguments.steps)
        step, part = map(statistics.median, (cost.steps, cost.slices))
        low, *_, high = statistics.quantiles(cost.slices, n=20)
        print(
            f"{workload}: {cost.nbytes / 1e6:.1f} MB in {cost.rotation} slices; a step "
            f"{step * 1e3:.2f} ms, a slice {part * 1e6:.0f} us (5 to 95 %: {low * 1e6:.0f} to "
            f"{high * 1e6:.0f}; mean {statistics.mean(cost.slices) * 1e6:.0f}), "
            f"{100 * part / step:.2f} %; everything {cost.all * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
