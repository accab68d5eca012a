"""The gradients of a model on their way to the other ranks."""

from __future__ import annotations

from hvdlite.gradients.buckets import LEAST_ZERO_COPY, GradientBuckets
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.gradients.loss import LossExchange
from hvdlite.gradients.metadata import check_not_local, check_weighted, checked_samples
from hvdlite.gradients.plan import describe_sources, plan_for
from hvdlite.gradients.replicas import (
    ReplicaCheck,
    describe_optimizer,
    state_label,
    weight_label,
)
from hvdlite.gradients.strategy_state import common_part, consolidate, load, save

__all__ = [
    "LEAST_ZERO_COPY",
    "GradientBuckets",
    "GradientExchange",
    "LossExchange",
    "ReplicaCheck",
    "check_not_local",
    "check_weighted",
    "checked_samples",
    "common_part",
    "consolidate",
    "describe_optimizer",
    "describe_sources",
    "load",
    "plan_for",
    "save",
    "state_label",
    "weight_label",
]
