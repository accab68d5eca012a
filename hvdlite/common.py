"""The names that `hvdlite` and all adapters export.

Those that each job uses are imported with them (``from hvdlite.common import *``), those of the
recipe and of the rooms beside the core when they are first asked for (`beside`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from hvdlite.launch.function import run, spawn
    from hvdlite.recipe import (
        Sharding,
        average_metrics,
        first,
        gather,
        lockstep,
        on_rank_zero,
        scale_lr,
        seed,
        sum_metrics,
        warmup,
    )
    from hvdlite.recipe.progress import progress
    from hvdlite.schedule import Schedule, singa
    from hvdlite.tools.bench.compression_ranks import advise

_RECIPE = [
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
]
# Names that are imported when they are first asked for, as `module:attribute`.
_BESIDE = {
    **{name: f"hvdlite.recipe:{name}" for name in _RECIPE},
    "run": "hvdlite.launch.function:run",
    "spawn": "hvdlite.launch.function:spawn",
    "Schedule": "hvdlite.schedule:Schedule",
    "singa": "hvdlite.schedule:singa",
    "advise": "hvdlite.tools.bench.compression_ranks:advise",
}

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

if TYPE_CHECKING:
    __all__ += ["run", "spawn", "Schedule", "singa", "advise"]
    __all__ += ["Sharding", "lockstep", "scale_lr", "warmup", "average_metrics", "sum_metrics"]
    __all__ += ["gather", "first", "on_rank_zero", "seed", "progress"]

#: What ``__all__`` of each adapter begins with.
names = [*__all__, *_BESIDE]


def beside(
    exports: dict[str, Any], **more: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module that has the names here.

    Args:
        exports: The module's ``globals()``.
        more: Further names, and what they name: ``module`` or ``module:attribute``.
    """
    known = _BESIDE | more

    def find(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {exports['__name__']!r} has no attribute {name!r}")
        module, _, attribute = known[name].partition(":")
        found = import_module(module)
        exports[name] = getattr(found, attribute) if attribute else found
        return exports[name]

    return find, lambda: sorted({*exports, *known})
