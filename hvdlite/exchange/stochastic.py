"""Rounding at random, so that the mean is the value itself."""

from __future__ import annotations

from typing import Any

import numpy as np


def codes_at_random(values: Any, levels: int, generator: np.random.Generator) -> Any:
    """Round to integers: up with the probability of what exceeds the integer below.

    Random numbers have 24 bits, so that the mean is the value to 2**-24.

    Args:
        values: flat, from -``levels`` to ``levels``; they are overwritten.
        levels: 127 at most.
        generator: of one random number for each value.

    Returns:
        The integers plus ``levels``, as uint8.
    """
    values += generator.random(values.size, np.float32)
    np.floor(values, out=values)
    # The largest one, plus a number just below 1, is rounded to the next integer.
    np.clip(values, -levels, levels, out=values)
    values += levels
    return values.astype(np.uint8)
