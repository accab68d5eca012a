"""Search for the entries of the greatest magnitude: those of a stable sort, but faster.

Without its sign bit, a float is an integer that grows with the magnitude. Magnitudes are compared
as integers, so that subnormal numbers differ from 0 even if a framework has told the processor to
flush them to 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.base import float16

# Sampled elements, from which a lower limit is estimated. For few values, or if more than a
# fraction of them is wanted, the estimate costs more than it saves.
_SAMPLE = 2**14
_FEW = 2**17
_LARGEST_PART = 4


def index_dtype(size: int) -> np.dtype[Any]:
    """Return the type of indices into ``size`` elements: four bytes wherever these suffice."""
    return np.dtype(np.uint32 if size <= 2**32 else np.uint64)


def greatest(values: Any, count: int) -> Any:
    """Find the entries of the greatest magnitude; of equal ones, those that come first.

    A sample of the values gives an estimate of a magnitude that few more than the wanted entries
    exceed. One pass collects these, and the choice is made among them. If the estimate was too
    high, all values are searched once more.

    Args:
        values: flat, float32 or float64, without NaN.
        count: how many entries, at least 1; if there are fewer, all are found.

    Returns:
        Their indices, in increasing order.
    """
    if count >= values.size:
        return np.arange(values.size, dtype=index_dtype(values.size))
    if values.size < _FEW or count > values.size // _LARGEST_PART:
        return _choose(values, count)
    limit = _estimate(values, count)
    candidates = _search(values, np.greater, limit)
    if candidates.size >= count:
        return candidates[_choose(values[candidates], count)]
    # Of zeros, say, there may be so many that the choice ends among them.
    tied = _search(values, np.equal, limit, count - candidates.size)
    if candidates.size + tied.size == count:
        return _merge(candidates, tied)
    return _choose(values, count)


def at_least(values: Any, threshold: float) -> Any:
    """Find the entries whose magnitude reaches a threshold, as `greatest` does.

    Args:
        threshold: above 0; it is not rounded to the type of the values.
    """
    with np.errstate(over="ignore"):  # only infinities lie beyond the type's range
        least = np.array([threshold]).astype(values.dtype)
    if float(least[0]) < threshold:
        least = np.nextafter(least, np.inf, dtype=least.dtype)
    return _search(values, np.greater, _magnitudes(least)[0] - 1)


def _magnitudes(values: Any) -> Any:
    words = values.view(f"i{values.dtype.itemsize}")
    return words & np.iinfo(words.dtype).max


def _estimate(values: Any, count: int) -> Any:
    """Return a magnitude that rather more than ``count`` entries exceed than fewer."""
    # At random and not at regular distances, which could hit one column of a matrix again and
    # again. The entries found do not depend on it.
    places = np.random.Generator(np.random.SFC64(0)).integers(values.size, size=_SAMPLE)
    sample = _magnitudes(values[places])
    expected = count * _SAMPLE / values.size
    return _nth(sample, int(expected + 4 * np.sqrt(expected) + 4))


def _nth(magnitudes: Any, count: int) -> Any:
    """Return the least of the ``count`` greatest magnitudes, which it reorders."""
    magnitudes.partition(magnitudes.size - count)
    return magnitudes[magnitudes.size - count]


def _choose(values: Any, count: int) -> Any:
    """Do the same as `greatest`, by a partition of all values."""
    limit = _nth(_magnitudes(values), count)
    chosen = _search(values, np.greater, limit)
    return _merge(chosen, _search(values, np.equal, limit, count - chosen.size))


def _merge(chosen: Any, tied: Any) -> Any:
    merged = np.concatenate([chosen, tied])
    merged.sort(kind="stable")  # which merges runs that are in order already
    return merged


def _search(values: Any, compare: np.ufunc, limit: Any, most: int | None = None) -> Any:
    """Return the indices of magnitudes that compare so to a limit; ``most`` of them, or all."""
    dtype = index_dtype(values.size)
    found = [np.empty(0, dtype)]
    most = values.size if most is None else most
    for piece in float16.pieces(values.size):
        if most <= 0:
            break
        here = np.flatnonzero(compare(_magnitudes(values[piece]), limit))[:most]
        found.append(np.add(here, piece.start, dtype=dtype, casting="unsafe"))
        most -= here.size
    return np.concatenate(found)
