"""hvdlite for ``tf.keras``: ``import hvdlite.tensorflow.keras as hvd``.

That is Keras 3, or legacy Keras where ``TF_USE_LEGACY_KERAS=1`` says so.
"""

from __future__ import annotations

import tensorflow as _tensorflow

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
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    warmup,
)
from hvdlite._keras.models import model_loader
from hvdlite._keras.values import allgather, allreduce, broadcast, broadcast_global_variables
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.device import pin_device
from hvdlite.tensorflow.keras import callbacks
from hvdlite.tensorflow.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

load_model = model_loader(_tensorflow.keras.models.load_model, DistributedOptimizer)

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
    "sharded",
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
