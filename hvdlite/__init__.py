"""hvdlite: one training script for one process becomes one for N.

The functions here work on numpy arrays and Python objects; ``hvdlite.torch`` and
``hvdlite.tensorflow`` offer the same and more on the tensors of their framework.
"""

from __future__ import annotations

from hvdlite import common, elastic
from hvdlite.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_async,
    barrier,
    broadcast,
    broadcast_async,
    join,
    poll,
    synchronize,
)
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.recipe import (
    Checkpoint,
    checkpoint,
    shard,
)
from hvdlite.scattering import (
    alltoall,
    alltoall_async,
    reducescatter,
    reducescatter_async,
)

__version__ = "0.1.0"

__all__ = [
    *common.__all__,
    # collectives
    "allreduce",
    "allreduce_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "broadcast",
    "broadcast_async",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "broadcast_object",
    "allgather_object",
    "join",
    "barrier",
    "poll",
    "synchronize",
    # the recipe
    "shard",
    "checkpoint",
    "Checkpoint",
    # training
    "elastic",
]
