"""Benchmark training steps on GPUs: what the exchange adds to them.

    python -m tests.benchmarks.gpu_training [--ranks N] [--workloads NAME ...] [--quick]

Contenders: the step alone, hvdlite's optimizer, and PyTorch's DDP on NCCL where NCCL serves these
ranks. A second job with ``HVDLITE_DEVICE_TRANSPORT=host`` times hvdlite through host memory. A
time is that of several steps in a row, after which the host waits for the device. Ranks that share
a device need NCCL 2.30 and ``NCCL_MULTI_RANK_GPU_ENABLE=1``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.tools.bench import job, measurement, report
from hvdlite.tools.bench.measurement import Contender, Ranks, interleave
from hvdlite.tools.bench.training_ranks import warm_up
from hvdlite.tools.bench.workloads import WORKLOADS
from hvdlite.tools.cli.arguments import positive
from hvdlite.torch import benchmark
from hvdlite.transport.gpu.cuda import Cuda
from tests.benchmarks import files
from tests.benchmarks.gpu import nccl_serves, torch_nccl

_STEPS = 10
# Larger than on processors, so that a step keeps the device busy.
_BATCHES = {"layers": 4096, "resnet": 256, "mlp": 1024}
_TOLERANCE = 1e-2  # convolutions use TF32, and add in any order


def main() -> None:
    """Measure with each way of exchange, print, and write the JSON."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    ways = ["auto", "host"]
    parser.add_argument("--transports", nargs="+", default=ways, choices=ways)
    files.add_limits(parser, rounds=100, seconds=8.0)
    options = parser.parse_args()
    records = []
    facts = report.machine()
    for way in options.transports:
        os.environ["HVDLITE_DEVICE_TRANSPORT"] = way
        arguments = {"workloads": options.workloads, "limit": files.limits(options)}
        outcome = job.run(options.ranks, "tests.benchmarks.gpu_training:measure", arguments)
        records += outcome.result
    outcome = outcome._replace(result=records)
    document = files.save(f"gpu_training_{options.ranks}", facts, outcome, options)
    print(_table(records))
    print(f"{records[0]['device']}, {options.ranks} ranks; {report.describe(document)}")


def measure(
    comm: MPI.Comm, workloads: Sequence[str], limit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time training steps of models of `WORKLOADS`; collective."""
    device = comm.rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    hvd.init(comm)
    ways: dict[str, Callable[[nn.Module], benchmark.Trained]] = {
        "alone": benchmark.alone,
        "hvdlite": benchmark.hvdlite,
    }
    transport = os.environ["HVDLITE_DEVICE_TRANSPORT"]
    with contextlib.ExitStack() as stack:
        if transport == "auto" and nccl_serves(comm, Cuda(), device):
            transport = "nccl"
            stack.enter_context(torch_nccl(comm, device))
            ways["ddp"] = _ddp
        records = [
            {"transport": transport, **_measure(comm, workload, ways, limit)}
            for workload in workloads
        ]
    hvd.shutdown()
    return records


def _measure(
    comm: MPI.Comm,
    workload: str,
    ways: dict[str, Callable[[nn.Module], benchmark.Trained]],
    limit: dict[str, Any],
) -> dict[str, Any]:
    job.say(comm, f"{WORKLOADS[workload].title} on {report.count_text(comm.size, 'rank')}")
    replicas = [_Replica(name, workload, comm.rank, way) for name, way in ways.items()]
    warm_up(comm, replicas, _TOLERANCE)
    contenders = [Contender(replica.name, replica.steps) for replica in replicas]
    times = interleave(Ranks(comm), contenders, **limit)
    times = {name: seconds / _STEPS for name, seconds in times.items()}
    others = [name for name in times if name != "alone"]
    return {
        "workload": workload,
        "ranks": comm.size,
        "batch_per_rank": _BATCHES[workload],
        "device": torch.cuda.get_device_name(),
        **measurement.compare(times, "alone"),
        "overheads": {name: measurement.summary(times[name] - times["alone"]) for name in others},
    }


class _Replica(benchmark.Replica):
    """A replica on this rank's device."""

    def __init__(
        self, name: str, workload: str, seed: int, way: Callable[[nn.Module], benchmark.Trained]
    ) -> None:
        super().__init__(
            name, workload, _BATCHES[workload], seed, lambda model: way(model.to("cuda"))
        )
        self._inputs, self._labels = self._inputs.cuda(), self._labels.cuda()

    def steps(self) -> None:
        """Take some steps, and wait for the device."""
        for _ in range(_STEPS):
            self.step()
        torch.cuda.synchronize()


def _ddp(model: nn.Module) -> benchmark.Trained:
    return benchmark.alone(DistributedDataParallel(model, gradient_as_bucket_view=True))


def _table(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        for name, seconds in record["seconds"].items():
            row = [record["workload"], record["transport"], name, report.spread_text(seconds)]
            if name != "alone":
                row += [
                    report.spread_text(record["overheads"][name]),
                    report.ratio_text(record["ratios"][name]),
                ]
            rows.append([*row, *[""] * (6 - len(row))])
    return report.table(["model", "transport", "contender", "step", "adds", "times alone"], rows)


if __name__ == "__main__":
    main()
