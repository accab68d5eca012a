"""The parts of the data-parallel recipe that are independent of the framework.

Sharding of data, learning-rate scaling with warm-up, averages of metrics, checkpoints
written by rank 0, work that rank 0 does first, and each rank's share of the node's cores and
accelerators.
"""

from __future__ import annotations

from hvdlite.recipe.batches import Batches, shard
from hvdlite.recipe.checkpoints import Checkpoint, checkpoint
from hvdlite.recipe.learning_rate import scale_lr, warmup
from hvdlite.recipe.metrics import average_metrics
from hvdlite.recipe.rank_zero import first, on_rank_zero
from hvdlite.recipe.resources import local_device_index, threads_per_rank
from hvdlite.recipe.sharding import Sharding

__all__ = [
    "Batches",
    "Sharding",
    "shard",
    "scale_lr",
    "warmup",
    "average_metrics",
    "Checkpoint",
    "checkpoint",
    "first",
    "on_rank_zero",
    "local_device_index",
    "threads_per_rank",
]
