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
    allgather_object,
    barrier,
    broadcast_object,
    common,
    shard,
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
from hvdlite.keras import callbacks, elastic
from hvdlite.keras.backend import pin_device
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

load_model = model_loader(_keras.saving.load_model, DistributedOptimizer)

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
]
