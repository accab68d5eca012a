"""The parts of the data-parallel recipe that are independent of the framework.

Sharding of data, learning-rate scaling with warm-up, averages of metrics, checkpoints
written by rank 0, work that rank 0 does first, seeds, a progress bar, and each rank's share of the
node's cores and accelerators.
"""

from __future__ import annotations

from hvdlite.recipe.batches import shard
from hvdlite.recipe.checkpoints import Checkpoint, checkpoint
from hvdlite.recipe.learning_rate import scale_lr, warmup
from hvdlite.recipe.metrics import average_metrics, gather, sum_metrics
from hvdlite.recipe.progress import progress
from hvdlite.recipe.rank_zero import first, on_rank_zero
from hvdlite.recipe.seeding import seed
from hvdlite.recipe.sharding import Sharding
from hvdlite.recipe.streams import Stream, lockstep

__all__ = [
    "Sharding",
    "Stream",
    "lockstep",
    "shard",
    "scale_lr",
    "warmup",
    "average_metrics",
    "sum_metrics",
    "gather",
    "Checkpoint",
    "checkpoint",
    "first",
    "on_rank_zero",
    "seed",
    "progress",
]
