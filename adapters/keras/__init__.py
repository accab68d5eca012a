"""hvdlite for Keras 3: ``import hvdlite.keras as hvd``.

On TensorFlow and on PyTorch, whichever Keras runs on (``KERAS_BACKEND``).
"""

from __future__ import annotations

try:
    import keras as _keras
except ImportError as error:
    raise ImportError(
        f"hvdlite.keras needs Keras 3, which cannot be imported ({error}); install it with "
        "`pip install hvdlite[keras]`"
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
from hvdlite._keras.models import model_loader
from hvdlite._keras.values import allgather, allreduce, broadcast, broadcast_global_variables
from hvdlite.keras import callbacks
from hvdlite.keras.backend import pin_device
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

load_model = model_loader(_keras.saving.load_model, DistributedOptimizer)

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
    "allgather",
    "broadcast",
    "broadcast_object",
    "allgather_object",
    "barrier",
    # training
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_global_variables",
    "load_model",
    "callbacks",
    # the recipe
    "pin_device",
    "shard",
    "Sharding",
    "scale_lr",
    "warmup",
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
