"""hvdlite for ``tf.keras``: ``import hvdlite.tensorflow.keras as hvd``.

That is Keras 3, or legacy Keras where ``TF_USE_LEGACY_KERAS=1`` says so.
"""

from __future__ import annotations

import tensorflow as _tensorflow

from hvdlite import (
    allgather_object,
    barrier,
    broadcast_object,
    common,
)
from hvdlite._keras.models import model_loader
from hvdlite._keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.device import pin_device
from hvdlite.tensorflow.keras import callbacks, elastic
from hvdlite.tensorflow.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

load_model = model_loader(_tensorflow.keras.models.load_model, DistributedOptimizer)

__all__ = [
    *common.__all__,
    # collectives
    "allreduce",
    "allgather",
    "broadcast",
    "reducescatter",
    "broadcast_object",
    "allgather_object",
    "barrier",
    # training
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
]
