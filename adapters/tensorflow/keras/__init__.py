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
    ProcessSet,
    Product,
    ReduceOp,
    SettingsError,
    Sharding,
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
    shutdown,
    size,
    spawn,
    start_timeline,
    stop_timeline,
    warmup,
)
from hvdlite._keras.models import model_loader
from hvdlite._keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.device import pin_device
from hvdlite.tensorflow.keras import callbacks, elastic
from hvdlite.tensorflow.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

load_model = model_loader(_tensorflow.keras.models.load_model, DistributedOptimizer)

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
    "allgather",
    "broadcast",
    "reducescatter",
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
    "elastic",
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
