"""Ranks of the training benchmark."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.benchmarks import statistics
from tests.benchmarks.job import say
from tests.benchmarks.measurement import Contender, Limit, interleave
from tests.benchmarks.workloads import WORKLOADS

_WARM_UP_STEPS = 2
_TOLERANCE = 1e-3


def measure(comm: MPI.Comm, framework: str, workload: str, limit: dict[str, Any]) -> dict[str, Any]:
    """Time training steps of one model; collective.

    Args:
        comm: all ranks.
        framework: ``torch`` or ``tensorflow``.
        workload: a name of `WORKLOADS`.
        limit: arguments of `Limit`.

    Returns:
        The record of this case.
    """
    module = importlib.import_module(f"tests.benchmarks.{framework}_replicas")
    chosen = WORKLOADS[workload]
    say(comm, f"{framework}: {chosen.title} on {comm.size} ranks")
    with module.replicas(comm, workload, chosen.batch) as replicas:
        _warm_up(comm, replicas)
        contenders = [Contender(replica.name, replica.step) for replica in replicas]
        times = interleave(comm, contenders, Limit(**limit), chosen.steps)
        _check_losses(comm, replicas)
    return {
        "framework": framework,
        "workload": workload,
        "title": chosen.title,
        "ranks": comm.size,
        "batch_per_rank": chosen.batch,
        "steps_in_a_row": chosen.steps,
        "rounds": len(times["alone"]),
        "seconds": {name: statistics.summary(samples) for name, samples in times.items()},
        **_compare(times),
    }


def _compare(times: dict[str, Any]) -> dict[str, Any]:
    alone = times["alone"]
    others = [name for name in times if name != "alone"]
    ratios = {
        f"hvdlite / {name}": statistics.overhead_ratio(times["hvdlite"], times[name], alone)
        for name in others
        if name != "hvdlite"
    }
    overheads = {name: statistics.overhead(times[name], alone) for name in others}
    return {"overhead_seconds": overheads, "overhead_ratios": ratios}


def _warm_up(comm: MPI.Comm, replicas: list[Any]) -> None:
    """Take the first steps, and check the result of the very first exchange."""
    for replica in replicas:
        replica.step()
    by_name = {replica.name: replica for replica in replicas}
    expected = by_name["alone"].gradients().copy()
    comm.Allreduce(MPI.IN_PLACE, expected, MPI.SUM)
    expected /= comm.size
    for name, replica in by_name.items():
        distance = np.linalg.norm(replica.gradients() - expected)
        # Not exchanged, they would be as far from the average as a rank's own are.
        if name != "alone" and not distance <= _TOLERANCE * np.linalg.norm(expected):
            raise RuntimeError(
                f"{name} on rank {comm.rank}: the exchanged gradients differ from the average by "
                f"{distance:.3g}, whose norm is {np.linalg.norm(expected):.3g}; its time would "
                "mean nothing"
            )
    for _ in range(_WARM_UP_STEPS):
        for replica in replicas:
            replica.step()


def _check_losses(comm: MPI.Comm, replicas: list[Any]) -> None:
    for replica in replicas:
        if not np.isfinite(replica.loss()):
            raise RuntimeError(
                f"{replica.name} on rank {comm.rank}: the loss is {replica.loss()} at the end; "
                "numbers that are not finite take other times"
            )
