"""What happens to gradients on their way: strategies, by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hvdlite.exchange.bucket import Bucket, Parameter, Reduction
from hvdlite.exchange.strategy import Cast, Dense, Strategy

__all__ = [
    "Bucket",
    "Cast",
    "Compression",
    "Dense",
    "Parameter",
    "Reduction",
    "Strategy",
    "check_groups",
    "check_strategy",
]


class Compression:
    """The strategies that ``compression=`` takes, the same objects for every framework."""

    none: Strategy = Dense()
    fp16: Strategy = Cast("fp16", np.float16)
    bf16: Strategy = Cast("bf16", ml_dtypes.bfloat16)


def check_strategy(compression: Any) -> Strategy:
    """Return ``compression`` if it is a strategy.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(compression, Strategy):
        raise TypeError(
            f"compression={compression!r} is not a strategy of hvdlite; use hvd.Compression.none, "
            ".fp16 or .bf16"
        )
    return compression


def check_groups(num_groups: int, groups: int | list[Any] | None) -> None:
    """Check Horovod's two ways to group gradients, which buckets have no need of.

    Raises:
        ValueError: a number is negative, or ``groups`` is neither a number nor a list.
    """
    if num_groups < 0 or (isinstance(groups, int) and groups < 0):
        raise ValueError(
            f"num_groups={num_groups} and groups={groups} must not be negative; leave them out"
        )
    if groups is not None and not isinstance(groups, (int, list)):
        raise ValueError(f"groups={groups!r} is neither a number nor a list of lists of parameters")
