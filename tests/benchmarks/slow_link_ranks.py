"""Ranks of the slow link benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import hvdlite.torch as hvd
from hvdlite.tools.bench import measurement
from hvdlite.tools.bench.measurement import Contender, Limit, Ranks, interleave
from tests.benchmarks import traffic
from tests.benchmarks.compression_training import distributed, make_model, train_step
from tests.benchmarks.strategies import BY_NAME, DENSE, Entry
from tests.benchmarks.traffic import Traffic

_INPUTS, _WIDTHS = 1024, (1280, 1280, 768)
_CLASSES = 10
_BATCH = 8
# In which parameters are compared, buckets packed anew, and low-rank factors found.
_WARM_UP_STEPS = 3
# In a row: what a link has saved up while it was silent is then a small part.
_STEPS = 3


def measure(comm: MPI.Comm, names: Sequence[str], limit: dict[str, Any]) -> list[dict[str, Any]]:
    """Time training steps with each strategy; collective.

    Args:
        comm: the ranks.
        names: of entries of `strategies`.
        limit: arguments of `Limit`.

    Returns:
        A record for each strategy, the dense exchange first.
    """
    torch.set_num_threads(1)
    with traffic.counting() as counter:
        hvd.init(comm)
    entries = [DENSE, *(BY_NAME[name] for name in names if name != DENSE.name)]
    contenders = [Contender(entry.name, _step_of(entry, comm.rank)) for entry in entries]
    sent = {each.name: _bytes_per_step(comm, each, counter) for each in contenders}
    seconds = interleave(Ranks(comm), contenders, Limit(**limit), calls=_STEPS)
    hvd.shutdown()
    return [
        {
            "strategy": entry.name,
            "settings": entry.strategy.name,
            "bytes_per_step": sent[entry.name],
            "rounds": len(seconds[entry.name]),
            "steps_in_a_row": _STEPS,
            "seconds": measurement.summary(seconds[entry.name]),
            "speedup": measurement.ratio(seconds[DENSE.name], seconds[entry.name]),
        }
        for entry in entries
    ]


def _step_of(entry: Entry, seed: int) -> partial[None]:
    model = make_model(_INPUTS, seed=0, widths=_WIDTHS)
    draw = np.random.default_rng(seed)
    images = torch.from_numpy(draw.standard_normal((_BATCH, _INPUTS), np.float32))
    labels = torch.from_numpy(draw.integers(_CLASSES, size=_BATCH))
    return partial(train_step, model, distributed(model, entry), images, labels)


def _bytes_per_step(comm: MPI.Comm, contender: Contender, counter: Traffic) -> float:
    """Warm up, and count the last step of that."""
    before = 0
    for _ in range(_WARM_UP_STEPS):
        before = counter.sent()
        contender.call()
    return float(comm.allreduce(counter.sent() - before)) / comm.size
