"""hvdlite for ``tf.keras``: ``import hvdlite.tensorflow.keras as hvd``.

``tf.keras`` is Keras 3, or legacy Keras if ``TF_USE_LEGACY_KERAS=1`` is set.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING

from hvdlite import common
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.keras import _values
from hvdlite.keras._backends import check_backend as _check_backend
from hvdlite.keras._backends import uses_legacy_keras as _uses_legacy_keras
from hvdlite.keras._values import *  # noqa: F403 - the collectives
from hvdlite.tensorflow.data import shard, sharded
from hvdlite.tensorflow.recipe import pin_device

if not _uses_legacy_keras:
    _check_backend(_os.environ.get("KERAS_BACKEND"))

from hvdlite.keras._tensorflow import ADAPTER
from hvdlite.tensorflow.keras import callbacks

DistributedOptimizer = ADAPTER.DistributedOptimizer
PartialDistributedOptimizer = ADAPTER.PartialDistributedOptimizer
load_model = ADAPTER.load_model
summary_writer = ADAPTER.summary_writer

if TYPE_CHECKING:
    from hvdlite.tensorflow.keras import elastic
else:
    __getattr__, __dir__ = common.beside(globals(), elastic="hvdlite.tensorflow.keras.elastic")

__all__ = [
    *common.names,
    *_values.__all__,
    # training
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "load_model",
    "callbacks",
    "elastic",
    # the recipe
    "pin_device",
    "shard",
    "sharded",
    "summary_writer",
]
