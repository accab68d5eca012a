"""Measure what virtual ranks cost: training steps on the same global batch, with and without.

``python -m tests.benchmarks.virtual_ranks [--np N] [--turns N] [--model MODEL]`` starts jobs in
turns, each of which trains a model of ``hvdlite bench training``, ResNet-18 by default, on a global
batch of 32 samples. Virtual ranks cut it into smaller batches, of which each process computes
several, one after the other; so a part of the cost is that of small batches. The last column tells
it: the time of as many batches of that size without any exchange.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from hvdlite.tools.bench import job
from hvdlite.tools.bench.measurement import timed
from hvdlite.tools.bench.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS
from tests.benchmarks.files import median_text

GLOBAL_BATCH = 32
_COMPRESSIONS = ("none", "topk", "powersgd")
_STEPS, _WARM_UP = 6, 2


def train(_: Any, model_name: str, virtual: int, compression: str) -> dict[str, float]:
    """Return the median seconds of a step, with and without the exchange."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite.torch import benchmark

    strategies = {
        "none": hvd.Compression.none,
        "topk": hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.01)),
        "powersgd": hvd.Compression.PowerSGD(4),
    }
    hvd.init(virtual_ranks=virtual)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = benchmark.build(model_name)
    batch = GLOBAL_BATCH // hvd.virtual_size()
    samples, labels = map(torch.from_numpy, WORKLOADS[model_name].data(batch, hvd.rank()))
    samples = samples.movedim(-1, 1).contiguous() if samples.dim() == 4 else samples
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    parts = len(range(hvd.rank(), hvd.virtual_size(), hvd.size()))

    def compute() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(samples), labels).backward()

    def step_alone() -> None:
        for _ in range(parts):
            compute()
        optimizer.step()

    def step() -> None:
        for _ in range(parts):
            hvd.virtual_rank()  # chooses the data in a training; else a warning
            compute()
            optimizer.step()

    found = {"alone": _seconds(step_alone, hvd)}
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=strategies[compression],
        model=model,
    )
    found["exchanged"] = _seconds(step, hvd)
    hvd.shutdown()
    return found


def _seconds(step: Callable[[], None], hvd: Any) -> float:
    """Return the median seconds of a step."""
    times = []
    for _ in range(_STEPS + _WARM_UP):
        hvd.barrier()
        times.append(timed(step))
    return statistics.median(times[_WARM_UP:])


def main() -> None:
    """Print a line for each number of virtual ranks and each compression."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--model", choices=[*WORKLOADS], default="resnet")
    options = parser.parse_args()
    seconds: dict[tuple[str, int], list[dict[str, float]]] = {
        (compression, virtual): []
        for compression in _COMPRESSIONS
        for virtual in (0, options.np, 2 * options.np, 4 * options.np)
    }
    for _ in range(options.turns):
        for (compression, virtual), found in seconds.items():
            arguments = {"model_name": options.model, "virtual": virtual}
            arguments["compression"] = compression
            done = job.run(options.np, "tests.benchmarks.virtual_ranks:train", arguments)
            found.append(done.result)
    for (compression, virtual), found in seconds.items():
        plain = [each["exchanged"] for each in seconds[compression, 0]]
        step = statistics.median(each["exchanged"] for each in found)
        ratios = [each["exchanged"] / one for each, one in zip(found, plain, strict=True)]
        small = [each["alone"] / one for each, one in zip(found, plain, strict=True)]
        print(
            f"{compression}, virtual_ranks={virtual}: {step * 1e3:.0f} ms a step, "
            f"times that without: {median_text(ratios, 2)}; "
            f"its batches alone {statistics.median(small):.2f}"
        )


if __name__ == "__main__":
    main()
