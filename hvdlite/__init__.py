"""hvdlite: one training script for one process becomes one for N.

The functions here work on numpy arrays and Python objects; ``hvdlite.torch`` and
``hvdlite.tensorflow`` offer the same and more on the tensors of their framework.
"""

from __future__ import annotations

from pathlib import Path

from hvdlite import elastic
from hvdlite.build import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
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
from hvdlite.errors import (
    CheckpointError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    SettingsError,
)
from hvdlite.exchange import Compression
from hvdlite.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from hvdlite.launch.function import run, spawn
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.process_sets import ProcessSet, global_process_set
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
from hvdlite.runtime import (
    add_process_set,
    init,
    remove_process_set,
    shutdown,
    start_timeline,
    stop_timeline,
)
from hvdlite.scattering import (
    alltoall,
    alltoall_async,
    reducescatter,
    reducescatter_async,
)
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
    "run",
    "spawn",
    # ranks
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    # process sets
    "ProcessSet",
    "global_process_set",
    "add_process_set",
    "remove_process_set",
    # what is installed
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
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
