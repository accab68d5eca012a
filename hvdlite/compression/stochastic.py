"""Rounding at random, so that the mean is the value itself."""

from __future__ import annotations

from typing import Any

import numpy as np


def codes_at_random(values: Any, levels: int, generator: np.random.Generator) -> Any:
    """Round to integers: up with the probability of what exceeds the integer below.

    Random numbers have 24 bits, so that the mean is the value to 2**-24.

    Args:
        values: flat; they are overwritten.
        levels: the greatest integer, 127 at most, and the negative of the least one. What is
            beyond becomes these.
        generator: of one random number for each value.

    Returns:
        The integers plus ``levels``, as uint8.
    """
    below = np.floor(values)
    values -= below
    below += generator.random(values.size, np.float32) < values
    np.clip(below, -levels, levels, out=below)
    below += levels
    return below.astype(np.uint8)
