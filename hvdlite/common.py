"""The names that `hvdlite` and all adapters export."""

from __future__ import annotations

from hvdlite import assembly as assembly  # which fills the seams of the core
from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from hvdlite.compression import Compression
from hvdlite.engine.build import (
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
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.engine.runtime import (
    add_process_set,
    init,
    remove_process_set,
    shutdown,
    start_timeline,
    stop_timeline,
)
from hvdlite.errors import (
    CheckpointError,
    GradientError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    SettingsError,
)
from hvdlite.launch.function import run, spawn
from hvdlite.recipe import (
    Sharding,
    average_metrics,
    first,
    gather,
    lockstep,
    on_rank_zero,
    progress,
    scale_lr,
    seed,
    sum_metrics,
    warmup,
)
from hvdlite.schedule import Schedule, singa
from hvdlite.tools.bench.compression_ranks import advise
from hvdlite.transport.counting import traffic
from hvdlite.world.parts import virtual_rank, virtual_size
from hvdlite.world.world import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)

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
    "virtual_rank",
    "virtual_size",
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
    # training
    "Compression",
    "advise",
    "Schedule",
    "singa",
    # the recipe
    "Sharding",
    "lockstep",
    "scale_lr",
    "warmup",
    "average_metrics",
    "sum_metrics",
    "gather",
    "first",
    "on_rank_zero",
    "seed",
    "progress",
    # what happens when
    "start_timeline",
    "stop_timeline",
    "traffic",
    # errors
    "HorovodInternalError",
    "GradientError",
    "MismatchError",
    "HostsUpdatedInterrupt",
    "NotInitializedError",
    "SettingsError",
    "CheckpointError",
]
