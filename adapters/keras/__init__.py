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
    shard,
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
from hvdlite.keras import callbacks, elastic
from hvdlite.keras.backend import pin_device
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

load_model = model_loader(_keras.saving.load_model, DistributedOptimizer)

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
