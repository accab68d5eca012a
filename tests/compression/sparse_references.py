"""References for sparse strategies, in numpy float64 and by plain sorts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.references import dtype_of

SHAPES = {"a": (7, 9), "b": (), "c": (131,), "d": (0, 3), "e": (1,), "f": (5, 5, 5)}
DTYPES = ["float32", "float64", "float16", "bfloat16"]


def largest(values: Any, count: int) -> Any:
    """Return the indices of the greatest magnitudes, by a stable sort."""
    order = np.argsort(-np.abs(values.astype(np.float64)), kind="stable")
    return np.sort(order[:count])


def keep(values: Any, indices: Any) -> Any:
    """Return the values at some indices, and zeros elsewhere."""
    kept = np.zeros_like(values)
    kept[indices] = values[indices]
    return kept


def joined(gradients: Mapping[str, Any]) -> Any:
    """Return all of a rank's gradients, flat, in float64."""
    return np.concatenate([np.ravel(each).astype(np.float64) for each in gradients.values()])


def check_result(found: Mapping[str, Any], sent: Sequence[Any], divisor: int, dtype: str) -> None:
    """Assert that results are the sum of what the ranks have sent, divided, to rounding."""
    for each in found.values():
        assert each.dtype == dtype_of(dtype)
    total = sum(sent) / divisor
    magnitude = sum(map(np.abs, sent)) / divisor
    result = joined(found)
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    bound = 2.0**-bits * np.abs(total) + 8 * 2.0 ** -max(23, bits) * magnitude + 1e-7 * (bits == 10)
    assert (np.abs(result - total) <= bound).all()
    np.testing.assert_array_equal(result[magnitude == 0], 0)
