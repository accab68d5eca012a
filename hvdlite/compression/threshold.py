"""Gradients of some magnitude only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite.arguments import check_positive
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.selection import at_least
from hvdlite.compression.sparse import Sparse


@dataclass(frozen=True, repr=False)
class Threshold(Sparse):
    """Send the entries whose magnitude is a threshold or more: many, few or none on a rank.

    To be used with `ErrorFeedback`, without which small gradients are never sent: Strom 2015,
    "Scalable distributed DNN training using commodity GPU cloud computing".

    Args:
        value: the threshold, above 0. With error feedback it is compared with the sum of the
            gradient and of what has not been sent before.

    Raises:
        ValueError: ``value`` is not a number above 0.
    """

    value: float

    def __post_init__(self) -> None:
        check_positive("value", self.value)

    def select(self, bucket: Bucket) -> Any:
        """All that reach the threshold."""
        return at_least(bucket.send, self.value)
