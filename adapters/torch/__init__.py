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
    Product,
    ReduceOp,
    SettingsError,
    Sum,
    allgather_object,
    average_metrics,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    scale_lr,
    shard,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    warmup,
)
from hvdlite.exchange import Compression
from hvdlite.recipe import Sharding
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
)
from hvdlite.torch.device import pin_device
from hvdlite.torch.handles import poll, synchronize
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.sampler import ShardSampler
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
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "allgather_object",
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
