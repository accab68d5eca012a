"""hvdlite for PyTorch: ``import hvdlite.torch as hvd``."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"hvdlite.torch needs PyTorch, which cannot be imported ({error}); install it with "
        "`pip install hvdlite[torch]`"
    ) from error

from hvdlite import (
    Adasum,
    Average,
    CheckpointError,
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
    Sum,
    add_process_set,
    allgather_object,
    average_metrics,
    barrier,
    broadcast_object,
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
    shard,
    shutdown,
    size,
    spawn,
    start_timeline,
    stop_timeline,
    warmup,
)
from hvdlite.exchange import Compression
from hvdlite.recipe import Sharding
from hvdlite.torch import elastic
from hvdlite.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    join,
)
from hvdlite.torch.device import pin_device
from hvdlite.torch.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from hvdlite.torch.handles import poll, synchronize
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.sampler import ShardSampler
from hvdlite.torch.scattering import (
    alltoall,
    alltoall_async,
    reducescatter,
    reducescatter_async,
)
from hvdlite.torch.sparse import sparse_allreduce_async
from hvdlite.torch.state import (
    TensorCheckpoint,
    broadcast_optimizer_state,
    broadcast_parameters,
    checkpoint,
)
from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

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
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "broadcast_object",
    "allgather_object",
    "join",
    "sparse_allreduce_async",
    "barrier",
    "poll",
    "synchronize",
    # training
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "elastic",
    # the recipe
    "pin_device",
    "shard",
    "ShardSampler",
    "Sharding",
    "scale_lr",
    "warmup",
    "checkpoint",
    "TensorCheckpoint",
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
