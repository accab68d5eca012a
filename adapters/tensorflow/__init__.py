"""hvdlite for TensorFlow: ``import hvdlite.tensorflow as hvd``."""

from __future__ import annotations

from typing import Any

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"hvdlite.tensorflow needs TensorFlow, which cannot be imported ({error}); install it "
        "with `pip install hvdlite[tensorflow]`"
    ) from error

from hvdlite import (
    Adasum,
    Average,
    CheckpointError,
    Compression,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    Max,
    Min,
    MismatchError,
    NotInitializedError,
    ProcessSet,
    Product,
    ReduceOp,
    SettingsError,
    Sharding,
    Sum,
    add_process_set,
    average_metrics,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    run,
    scale_lr,
    shutdown,
    size,
    spawn,
    start_timeline,
    stop_timeline,
    warmup,
)
from hvdlite.tensorflow import elastic
from hvdlite.tensorflow.collectives import allgather, allreduce, barrier, broadcast, join
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.device import pin_device
from hvdlite.tensorflow.grouped import (
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
)
from hvdlite.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
from hvdlite.tensorflow.optimizer import DistributedOptimizer
from hvdlite.tensorflow.rank_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdlite.tensorflow.scattering import alltoall, reducescatter
from hvdlite.tensorflow.state import (
    TensorCheckpoint,
    assign_variables,
    broadcast_,
    broadcast_variables,
    checkpoint,
)
from hvdlite.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdlite.tensorflow.version1 import BroadcastGlobalVariablesHook, broadcast_global_variables

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
    "rank_op",
    "size_op",
    "local_rank_op",
    "local_size_op",
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
    "process_set_included_op",
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
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
    "join",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "allgather_object",
    "barrier",
    # training
    "Compression",
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "DistributedOptimizer",
    "broadcast_variables",
    "elastic",
    "broadcast_global_variables",
    "BroadcastGlobalVariablesHook",
    # the recipe
    "pin_device",
    "shard",
    "sharded",
    "Sharding",
    "scale_lr",
    "warmup",
    "checkpoint",
    "TensorCheckpoint",
    "assign_variables",
    "average_metrics",
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


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # imports Keras, which then has chosen its backend
        from hvdlite.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
