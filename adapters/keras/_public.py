"""The names of `hvdlite.keras`; importing them imports Keras 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite import common
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.keras import _values, callbacks
from hvdlite.keras._data import shard
from hvdlite.keras._keras3 import ADAPTER, framework
from hvdlite.keras._values import *  # noqa: F403 - the collectives
from hvdlite.recipe.seeding import seed_too as _seed_too
from hvdlite.recipe.variables import seed_keras as _seed_keras

_seed_too(_seed_keras, parts=False)
DistributedOptimizer = ADAPTER.DistributedOptimizer
PartialDistributedOptimizer = ADAPTER.PartialDistributedOptimizer
load_model = ADAPTER.load_model
pin_device = framework.pin_device
summary_writer = ADAPTER.summary_writer

if TYPE_CHECKING:
    from hvdlite.keras import elastic
else:
    __getattr__, __dir__ = common.beside(globals(), elastic="hvdlite.keras.elastic")

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
    "summary_writer",
]
