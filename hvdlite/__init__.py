"""hvdlite: one training script for one process becomes one for N.

The functions here work on numpy arrays and Python objects; ``hvdlite.torch`` and
``hvdlite.tensorflow`` offer the same and more on the tensors of their framework.
"""

from __future__ import annotations

from pathlib import Path

from hvdlite import elastic
from hvdlite.collectives import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_async,
    barrier,
    broadcast,
    broadcast_async,
    broadcast_object,
    poll,
    synchronize,
)
from hvdlite.errors import (
    CheckpointError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    SettingsError,
)
from hvdlite.exchange import Compression
from hvdlite.recipe import (
    Checkpoint,
    Sharding,
    average_metrics,
    checkpoint,
    scale_lr,
    shard,
    warmup,
)
from hvdlite.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from hvdlite.runtime import init, shutdown, start_timeline, stop_timeline
from hvdlite.world import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)

__version__ = "0.1.0"

# In a checkout the adapters lie beside the core; an installation maps them into it.
_adapters = Path(__file__).parent.parent / "adapters"
if _adapters.is_dir():
    __path__.append(str(_adapters))

__all__ = [
    # start and end
    "init",
    "shutdown",
    "is_initialized",
    # ranks
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    # reductions
    "ReduceOp",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    # collectives
    "allreduce",
    "allreduce_async",
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "allgather_object",
    "barrier",
    "poll",
    "synchronize",
    # the recipe
    "shard",
    "Sharding",
    "scale_lr",
    "warmup",
    "checkpoint",
    "Checkpoint",
    "average_metrics",
    # training
    "Compression",
    "elastic",
    # what happens when
    "start_timeline",
    "stop_timeline",
    # errors
    "HorovodInternalError",
    "MismatchError",
    "HostsUpdatedInterrupt",
    "NotInitializedError",
    "SettingsError",
    "CheckpointError",
]
