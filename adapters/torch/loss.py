"""The losses that closures return, as numbers and back."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch


def value_of_loss(loss: Any) -> float | None:
    """Return a loss as a number; None: it is none, and no optimizer can decide by it."""
    if isinstance(loss, torch.Tensor):
        return float(loss.item()) if loss.numel() == 1 and not loss.is_complex() else None
    if isinstance(loss, np.ndarray):
        return float(loss.item()) if loss.size == 1 and loss.dtype.kind in "fiu" else None
    return float(loss) if isinstance(loss, Real) and not isinstance(loss, bool) else None


def loss_like(loss: Any, value: float) -> Any:
    """Return a number as a loss of another one's type; a whole number becomes a float."""
    if isinstance(loss, torch.Tensor):
        return torch.full_like(loss.detach(), value)
    if isinstance(loss, np.ndarray):
        return np.full_like(loss, value)
    return type(loss)(value) if isinstance(loss, np.floating) else value
