"""hvdlite for PyTorch: ``import hvdlite.torch as hvd``."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(
        f"hvdlite.torch needs PyTorch, which cannot be imported ({error}); install it with "
        "`pip install hvdlite[torch]`"
    ) from error

from hvdlite import (
    allgather_object,
    barrier,
    broadcast_object,
    common,
    shard,
)
from hvdlite.base import float16 as _float16
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.recipe.seeding import seed_too as _seed_too
from hvdlite.torch import collectives, groups
from hvdlite.torch.collectives import *  # noqa: F403
from hvdlite.torch.dynamo import untrace_all as _untrace_all
from hvdlite.torch.groups import *  # noqa: F403
from hvdlite.torch.handles import poll, synchronize
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.recipe import pin_device, summary_writer
from hvdlite.torch.sampler import ShardSampler, ShardStream
from hvdlite.torch.sparse import sparse_allreduce_async
from hvdlite.torch.state import (
    TensorCheckpoint,
    broadcast_optimizer_state,
    broadcast_parameters,
    checkpoint,
)
from hvdlite.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from hvdlite.torch.tensors import convert as _convert

_float16.use(_convert)
_seed_too(_torch.manual_seed)

if TYPE_CHECKING:
    from hvdlite.torch import elastic
    from hvdlite.torch.ddp import comm_hook, comm_hook_state
else:
    __getattr__, __dir__ = common.beside(
        globals(),
        elastic="hvdlite.torch.elastic",
        comm_hook="hvdlite.torch.ddp:comm_hook",
        comm_hook_state="hvdlite.torch.ddp:comm_hook_state",
    )

__all__ = [
    *common.names,
    # collectives
    *collectives.__all__,
    *groups.__all__,
    "broadcast_object",
    "allgather_object",
    "sparse_allreduce_async",
    "barrier",
    "poll",
    "synchronize",
    # training
    "DistributedOptimizer",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "comm_hook",
    "comm_hook_state",
    "elastic",
    # the recipe
    "pin_device",
    "shard",
    "ShardSampler",
    "ShardStream",
    "checkpoint",
    "TensorCheckpoint",
    "summary_writer",
]

# The rest, as rank(), does not communicate, and may be a part of a compiled graph.
_untrace_all(globals(), sorted({*__all__} - {*common.names}))
