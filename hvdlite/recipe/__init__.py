"""The recipe of data-parallel training that no framework has to know about.

Sharding the data, scaling the learning rate with a warm-up, averaging metrics,
checkpoints written by rank 0, and the share of the machine that is a rank's own.
"""

from __future__ import annotations

from hvdlite.recipe.batches import Batches, shard
from hvdlite.recipe.checkpoints import Checkpoint, checkpoint
from hvdlite.recipe.device import local_device_index, threads_per_rank
from hvdlite.recipe.learning_rate import scale_lr, warmup
from hvdlite.recipe.metrics import average_metrics
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
    "local_device_index",
    "threads_per_rank",
]
