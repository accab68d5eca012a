"""Ranks of the scaling benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import hvdlite.torch as hvd
from hvdlite.tools.bench import measurement
from hvdlite.tools.bench.job import say
from hvdlite.tools.bench.measurement import Limit, Ranks, order, rounds, timed
from hvdlite.torch import benchmark
from hvdlite.torch.benchmark import Replica

WORKLOAD = "resnet"
# After a start: one in which the parameters are compared, one in which the buckets are packed anew,
# and one in which nobody has touched their memory before.
_WARM_UP_STEPS = 3


def measure(
    comm: MPI.Comm, processes: Sequence[int], batch: int, steps: int, limit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time training steps on several numbers of processes; collective.

    In each round, each number has its turn: that many ranks start hvdlite among themselves and
    train, with the exchange and without, while the other ranks sleep.

    Args:
        comm: as many ranks as the largest of the numbers.
        processes: the numbers, 1 among them.
        batch: images per process and step.
        steps: in a row within a turn.
        limit: arguments of `Limit`.

    Returns:
        A record for each number of processes.
    """
    torch.set_num_threads(1)
    replicas = _replicas(comm, batch)
    teams = {number: _team(comm, number) for number in processes}
    rows = []
    for turn in rounds(Ranks(comm), Limit(**limit)):
        say(comm, f"round {turn + 1}")
        row = np.zeros((len(processes), len(replicas)))
        for index in order(len(processes), turn):
            number = processes[index]
            if comm.rank < number:
                row[index] = _train(teams[number], replicas, steps, turn)
            Ranks(comm).meet()
        rows.append(row)
    seconds = np.array(rows)
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    images = steps * batch * np.array(processes)[:, None] / seconds
    return _records(
        processes,
        batch,
        steps,
        {replica.name: images[..., index] for index, replica in enumerate(replicas)},
    )


def _replicas(comm: MPI.Comm, batch: int) -> list[Replica]:
    """Make the contenders on all ranks at once, and train them a first time."""
    hvd.init(comm)
    ways = {"alone": benchmark.alone, "hvdlite": benchmark.hvdlite}
    replicas = [Replica(name, WORKLOAD, batch, comm.rank, wrap) for name, wrap in ways.items()]
    for replica in replicas:
        replica.step()
    hvd.shutdown()
    return replicas


def _team(comm: MPI.Comm, number: int) -> Any:
    return comm.Split(color=0 if comm.rank < number else MPI.UNDEFINED, key=comm.rank)


def _train(team: MPI.Comm, replicas: Sequence[Replica], steps: int, turn: int) -> list[float]:
    """Return this rank's seconds for the steps of each contender."""
    hvd.init(team)
    by_name = {replica.name: replica for replica in replicas}
    by_name["hvdlite"].broadcast()  # some ranks of the team have trained more steps than others
    for _ in range(_WARM_UP_STEPS):
        by_name["hvdlite"].step()
    seconds = [0.0] * len(replicas)
    for index in order(len(replicas), turn):
        Ranks(team).meet()
        seconds[index] = steps * timed(replicas[index].step, steps)
    hvd.shutdown()
    return seconds


def _records(
    processes: Sequence[int], batch: int, steps: int, images: dict[str, np.ndarray[Any, Any]]
) -> list[dict[str, Any]]:
    """Return the records; speed-ups are over one process that trains without hvdlite."""
    hvdlite, alone = images["hvdlite"], images["alone"]
    single = alone[:, list(processes).index(1)]
    records = []
    for index, number in enumerate(processes):
        records.append(
            {
                "processes": number,
                "batch_per_process": batch,
                "steps_in_a_row": steps,
                "rounds": len(single),
                "images_per_second": {
                    name: measurement.summary(values[:, index]) for name, values in images.items()
                },
                "speedup": measurement.ratio(hvdlite[:, index], single),
                "efficiency": measurement.ratio(hvdlite[:, index], number * single),
                "of_limit": measurement.ratio(hvdlite[:, index], alone[:, index]),
                "speedup_of_limit": measurement.ratio(alone[:, index], single),
            }
        )
    return records
