"""hvdlite for TensorFlow: ``import hvdlite.tensorflow as hvd``."""

from __future__ import annotations

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
    Product,
    ReduceOp,
    SettingsError,
    Sharding,
    Sum,
    allgather_object,
    average_metrics,
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
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    warmup,
)
from hvdlite.tensorflow.collectives import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    local_rank_op,
    local_size_op,
    rank_op,
    size_op,
)
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.device import pin_device
from hvdlite.tensorflow.optimizer import DistributedOptimizer
from hvdlite.tensorflow.state import (
    TensorCheckpoint,
    assign_variables,
    broadcast_variables,
    checkpoint,
)
from hvdlite.tensorflow.tape import DistributedGradientTape

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
    "rank_op",
    "size_op",
    "local_rank_op",
    "local_size_op",
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
    "allgather",
    "broadcast",
    "broadcast_object",
    "allgather_object",
    "barrier",
    # training
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "broadcast_variables",
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
