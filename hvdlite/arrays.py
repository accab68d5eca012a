"""Arrays as the engine wants them: flat, contiguous, of a known type."""

from __future__ import annotations

from typing import Any

import numpy as np


def flat(array: Any) -> Any:
    """Return the elements as one contiguous 1-d array; a view where they lie so already."""
    return np.ascontiguousarray(array).reshape(-1)


def as_bytes(array: Any) -> Any:
    """View a flat contiguous array as bytes."""
    return array.view(np.uint8)


def describe(array: Any) -> str:
    """The dtype and shape in the form ``float32[10, 4]``."""
    return f"{array.dtype.name}{list(array.shape)}"
