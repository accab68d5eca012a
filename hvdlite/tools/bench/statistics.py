"""Medians, spreads and ratios of paired samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Samples = np.ndarray[Any, Any]

_RESAMPLES = 2000


def compare(times: Mapping[str, Samples], than: str = "hvdlite") -> dict[str, Any]:
    """Return the part of a record that has the times of all contenders.

    Args:
        times: by contender: seconds in each round.
        than: the contender that the others are compared with.

    Returns:
        ``rounds``; ``seconds`` and ``ratios`` (how many times as long as ``than``) as `summary`;
        and ``samples``, the times themselves.
    """
    return {
        "rounds": len(times[than]),
        "seconds": {name: summary(samples) for name, samples in times.items()},
        "ratios": {
            name: ratio(samples, times[than]) for name, samples in times.items() if name != than
        },
        "samples": {name: samples.tolist() for name, samples in times.items()},
    }


def summary(samples: Samples) -> dict[str, float]:
    """Return the median, and as spread the 10th and 90th percentile."""
    low, median, high = np.percentile(samples, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def ratio(over: Samples, under: Samples) -> dict[str, float]:
    """Return the ratio within each round, as `summary`."""
    return summary(over / under)


def overhead(samples: Samples, alone: Samples) -> dict[str, float]:
    """Return the difference within each round, as `summary`.

    The median of the differences, not the difference of the medians: the noise that both of a
    round have in common drops out.
    """
    return summary(samples - alone)


def overhead_ratio(over: Samples, under: Samples, alone: Samples) -> dict[str, float]:
    """Return the ratio of two median overheads, with a bootstrap interval of 80 %.

    Rounds are drawn again with replacement (Efron 1979, Annals of Statistics 7), whole, because
    the samples of one round belong together.
    """
    draws = np.random.default_rng(0).integers(len(alone), size=(_RESAMPLES, len(alone)))
    values = _ratio_of_medians(over[draws], under[draws], alone[draws])
    return {**summary(values), "median": float(_ratio_of_medians(over, under, alone))}


def _ratio_of_medians(over: Samples, under: Samples, alone: Samples) -> Samples:
    ratios: Samples = np.median(over - alone, axis=-1) / np.median(under - alone, axis=-1)
    return ratios
