"""hvdlite for TensorFlow: ``import hvdlite.tensorflow as hvd``."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import tensorflow as _tensorflow
except ImportError as error:
    raise ImportError(
        f"hvdlite.tensorflow needs TensorFlow, which cannot be imported ({error}); install it "
        "with `pip install hvdlite[tensorflow]`"
    ) from error

from hvdlite import common
from hvdlite.common import *  # noqa: F403 - the names common to all adapters
from hvdlite.recipe.seeding import seed_too as _seed_too
from hvdlite.recipe.variables import seed_keras as _seed_keras
from hvdlite.tensorflow import collectives, exchange_state, functions, rank_ops
from hvdlite.tensorflow.checkpoint import TensorCheckpoint, assign_variables, checkpoint
from hvdlite.tensorflow.collectives import *  # noqa: F403
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.exchange_state import *  # noqa: F403
from hvdlite.tensorflow.functions import *  # noqa: F403
from hvdlite.tensorflow.rank_ops import *  # noqa: F403
from hvdlite.tensorflow.recipe import gpu_available, pin_device, summary_writer
from hvdlite.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

_seed_too(_tensorflow.random.set_seed, parts=False)
_seed_too(_seed_keras, parts=False)

if TYPE_CHECKING:
    from hvdlite.keras._tensorflow import DistributedOptimizer
    from hvdlite.tensorflow import elastic
    from hvdlite.tensorflow.sync_batch_norm import SyncBatchNormalization
else:
    __getattr__, __dir__ = common.beside(
        globals(),
        elastic="hvdlite.tensorflow.elastic",
        # Keras' room imports this one.
        DistributedOptimizer="hvdlite.keras._tensorflow:DistributedOptimizer",
        # Imports Keras, which then has chosen its backend.
        SyncBatchNormalization="hvdlite.tensorflow.sync_batch_norm:SyncBatchNormalization",
    )

__all__ = [
    *common.names,
    *rank_ops.__all__,
    *collectives.__all__,
    *functions.__all__,
    # training
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "DistributedOptimizer",
    *exchange_state.__all__,
    "elastic",
    # the recipe
    "pin_device",
    "gpu_available",
    "shard",
    "sharded",
    "checkpoint",
    "TensorCheckpoint",
    "assign_variables",
    "summary_writer",
]
