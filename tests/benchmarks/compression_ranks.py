"""Ranks of the compression benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import hvdlite.torch as hvd
from hvdlite.tools.bench.job import say
from hvdlite.tools.bench.measurement import Ranks, watch
from hvdlite.transport.registry import connect
from hvdlite.world import world
from tests.benchmarks import compression_cost, traffic
from tests.benchmarks.compression_training import Data, accuracy, bytes_per_step
from tests.benchmarks.strategies import BY_NAME, DENSE, Entry

_SECONDS = 1800.0  # for all trainings with a strategy


def measure(
    comm: MPI.Comm,
    names: Sequence[str],
    epochs: Mapping[str, int],
    mnist: str,
    seeds: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Go through the strategies; collective.

    Args:
        comm: the ranks.
        names: of entries of `strategies`.
        epochs: by data set, digits or mnist.
        mnist: the folder of MNIST.
        seeds: how many trainings to take the mean of.
        rounds: of the timings.

    Returns:
        A record for each strategy, after one for a process that trains alone.
    """
    torch.set_num_threads(1)
    folders = {"digits": None, "mnist": Path(mnist)}
    data = {name: Data(folders[name]) for name in epochs}

    def accuracies(entry: Entry | None) -> dict[str, list[float]]:
        return {
            name: [accuracy(comm, entry, data[name], seed, epochs[name]) for seed in range(seeds)]
            for name in data
        }

    with traffic.counting() as counter:
        hvd.init(comm)
    say(comm, "one process")
    watch(_SECONDS)
    alone = {"strategy": "one process", "title": "one process", "accuracy": accuracies(None)}
    records: list[dict[str, Any]] = [alone]
    dense = bytes_per_step(comm, DENSE, counter)
    for entry in (BY_NAME[name] for name in names):
        say(comm, entry.name)
        watch(_SECONDS)
        sent = bytes_per_step(comm, entry, counter)
        records.append(
            {
                "strategy": entry.name,
                "title": entry.title,
                "settings": entry.strategy.name,
                "bytes_per_step": sent,
                "compression": dense / sent,
                "accuracy": accuracies(entry),
                **_cost(comm, entry, rounds),
            }
        )
    hvd.shutdown()
    return records


def _cost(comm: MPI.Comm, entry: Entry, rounds: int) -> dict[str, Any]:
    """Measure first on one rank while the others sleep, then on all."""
    found = compression_cost.on_one_core(entry, rounds) if comm.rank == 0 else None
    Ranks(comm).meet()
    transport = connect(MPI, world.current())
    whole = compression_cost.on_all_ranks(comm, transport, entry, rounds)
    transport.close()
    return {"one_core": found, "all_ranks": whole}
