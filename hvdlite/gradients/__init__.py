"""The gradients of a model on their way to the other ranks."""

from __future__ import annotations

from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.exchange import GradientExchange

__all__ = ["GradientBuckets", "GradientExchange"]
