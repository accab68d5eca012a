"""Averages of metrics over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdlite import collectives, world
from hvdlite.errors import HorovodInternalError


class _Entry(NamedTuple):
    """The values of one rank, or the reason why it has none."""

    values: dict[str, float]
    weight: float
    problem: str | None


def average_metrics(metrics: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
    """Average metrics over all ranks, each rank weighted by its number of samples.

    Collective: every rank calls it and gets the same floats. It takes one exchange, so that an
    error on one rank is an error on all.

    Args:
        metrics: Names and scalars (floats, integers, numpy scalars, 0-dimensional arrays).
            The same names on all ranks, in any order.
        weight: The number of samples behind this rank's values. Values of weight 0, even NaN,
            do not count.

    Returns:
        The averages, in the order of ``metrics``.

    Raises:
        ValueError: A rank's weight is negative or not finite, a value is not a scalar, or all
            weights are 0.
        HorovodInternalError: The ranks have different names.
    """
    entries = collectives.allgather_object(_entry_of(metrics, weight), name="average_metrics")
    _check(entries)
    total = sum(entry.weight for entry in entries)
    return {
        key: sum(r.weight * r.values[key] for r in entries if r.weight > 0) / total
        for key in entries[world.rank()].values
    }


def _entry_of(metrics: Mapping[str, float], weight: float) -> _Entry:
    """Check this rank's values without raising, since the other ranks wait for its entry."""
    try:
        values = {key: _scalar(f"metric {key!r}", value) for key, value in metrics.items()}
        share = _scalar("weight", weight)
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"weight={share!r} is not a number of samples: expected 0 or more")
    except Exception as error:
        return _Entry({}, 0.0, str(error))
    return _Entry(values, share, None)


def _scalar(name: str, value: Any) -> float:
    shape = tuple(getattr(value, "shape", ()))
    found = type(value).__name__ + (f" of shape {shape}" if shape else "")
    # float() would parse a string, and only warn when it drops an imaginary part.
    is_complex = getattr(getattr(value, "dtype", None), "kind", "") == "c"
    if isinstance(value, (str, bytes)) or is_complex or shape:
        raise ValueError(f"{name} is a {found}, expected a real scalar")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is a {found}, expected a real scalar ({error})") from error


def _check(entries: list[_Entry]) -> None:
    """Raise the same error on all ranks if the entries cannot be averaged."""
    problems = [f"rank {rank}: {r.problem}" for rank, r in enumerate(entries) if r.problem]
    if problems:
        raise ValueError("metrics cannot be averaged: " + "; ".join(problems))
    names = set().union(*(entry.values for entry in entries))
    missing = {
        name: ranks
        for name in sorted(names, key=str)
        if (ranks := [rank for rank, r in enumerate(entries) if name not in r.values])
    }
    if missing:
        found = "; ".join(f"{name!r} is missing on ranks {r}" for name, r in missing.items())
        raise HorovodInternalError(
            f"ranks have different metrics: {found}. Pass the same names on all ranks, "
            "with weight 0 where a rank has no samples"
        )
    if not any(entry.weight for entry in entries):
        raise ValueError(
            f"the weights of all {len(entries)} ranks are 0: pass the number of samples of each "
            "rank as weight"
        )
