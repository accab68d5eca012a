"""Gradients as a threshold with their sign, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite.arguments import check_positive
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec
from hvdlite.compression.quantised import Quantised
from hvdlite.compression.ternary import TernaryCodec, codes_of


@dataclass(frozen=True, repr=False)
class TwoBit(Quantised):
    """Every value as -threshold, 0 or threshold, in 2 bits.

    What is at least the threshold becomes the threshold, what is at most its negative becomes
    that, and all else becomes 0. It is MXNet's 2-bit compression, which feeds back what is left
    out: ``ErrorFeedback(TwoBit(0.5))``. Without that most values are never sent.

    Args:
        threshold: in the units of the gradients.

    Raises:
        ValueError: ``threshold`` is not a number above 0.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_positive("threshold", self.threshold)

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """The same for all ranks."""
        return _Thresholds(self.threshold)


class _Thresholds(TernaryCodec):
    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def codes(self, values: Any, head: Any) -> Any:
        """Compare."""
        return codes_of(values >= self._threshold, values <= -self._threshold)

    def magnitude(self, head: Any) -> Any:
        """The threshold."""
        return self._threshold
