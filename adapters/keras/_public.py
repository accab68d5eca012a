"""The names of `hvdlite.keras`; importing them imports Keras 3."""

from __future__ import annotations

from hvdlite import allgather_object, barrier, broadcast_object, common, shard
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.keras import callbacks, elastic
from hvdlite.keras._keras3 import ADAPTER, framework
from hvdlite.keras._values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)

DistributedOptimizer = ADAPTER.DistributedOptimizer
PartialDistributedOptimizer = ADAPTER.PartialDistributedOptimizer
load_model = ADAPTER.load_model
pin_device = framework.pin_device

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
