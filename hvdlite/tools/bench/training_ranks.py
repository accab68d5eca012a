"""Ranks of the training benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvdlite.tools.bench.job import naming, say
from hvdlite.tools.bench.measurement import (
    Contender,
    Ranks,
    compare,
    interleave,
    overhead_ratio,
    summary,
)
from hvdlite.tools.bench.report import count_text
from hvdlite.tools.bench.workloads import BACKENDS, WORKLOADS

_WARM_UP_STEPS = 2


def measure(
    comm: MPI.Comm,
    framework: str,
    contenders: Sequence[str],
    workload: str,
    limit: dict[str, Any],
) -> list[dict[str, Any]]:
    """Time training steps of one model, a workload by its name; collective."""
    adapter = importlib.import_module(f"hvdlite.{framework}.benchmark")
    chosen = WORKLOADS[workload]
    say(comm, f"{framework}: {chosen.title} on {count_text(comm.size, 'rank')}")
    with adapter.replicas(comm, contenders, workload) as replicas:
        warm_up(comm, replicas)
        steps = [Contender(replica.name, replica.step) for replica in replicas]
        times = interleave(Ranks(comm), steps, chosen.steps, **limit)
        for replica in replicas:
            loss = float(replica.loss)
            if not np.isfinite(loss):
                raise RuntimeError(
                    f"{replica.name} on rank {comm.rank}: the loss is {loss} at the end; "
                    "numbers that are not finite take other times"
                )
    record = {
        "framework": framework,
        "workload": workload,
        "title": chosen.title,
        "ranks": comm.size,
        "batch_per_rank": chosen.batch,
        "steps_in_a_row": chosen.steps,
        **compare(times),
        **_compare_overheads(times),
    }
    return [record]


def _compare_overheads(times: dict[str, Any]) -> dict[str, Any]:
    """Return what each contender adds to a step, and hvdlite's share of that."""
    alone = times["alone"]
    others = [name for name in times if name != "alone"]
    pairs = [("hvdlite", name) for name in others if name != "hvdlite"]
    on_gloo = [(name, name.partition("-")[0]) for name in others if name in BACKENDS]
    pairs += [(name, base) for name, base in on_gloo if name != base and base in others]
    return {
        # Medians of differences: the noise that both of a round have in common drops out.
        "overhead_seconds": {name: summary(times[name] - alone) for name in others},
        "overhead_ratios": {
            f"{name} / {other}": overhead_ratio(times[name], times[other], alone)
            for name, other in pairs
        },
    }


def warm_up(comm: MPI.Comm, replicas: Sequence[Any], tolerance: float = 1e-3) -> None:
    """Take the first steps, and check the result of the very first exchange.

    Gradients may differ from the average by ``tolerance``, a part of its norm.
    """
    for replica in replicas:
        with naming(replica.name):
            replica.step()
    by_name = {replica.name: replica for replica in replicas}
    expected = by_name["alone"].gradients().copy()
    comm.Allreduce(MPI.IN_PLACE, expected, MPI.SUM)
    expected /= comm.size
    for name, replica in by_name.items():
        distance = np.linalg.norm(replica.gradients() - expected)
        # Not exchanged, they would be as far from the average as a rank's own are.
        if name != "alone" and not distance <= tolerance * np.linalg.norm(expected):
            with naming(name):
                raise RuntimeError(
                    f"the exchanged gradients differ from the average by {distance:.3g}, whose "
                    f"norm is {np.linalg.norm(expected):.3g}; its time would mean nothing"
                )
    for _ in range(_WARM_UP_STEPS):
        for replica in replicas:
            replica.step()
