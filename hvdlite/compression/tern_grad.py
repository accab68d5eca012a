"""Gradients as -1, 0 or 1 times their greatest magnitude, at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdlite.arguments import check_choice, check_count, check_positive
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec, greatest_magnitude
from hvdlite.compression.quantised import (
    Quantised,
    bounds_of,
    generator_of,
)
from hvdlite.compression.stochastic import codes_at_random
from hvdlite.compression.ternary import TernaryCodec


@dataclass(frozen=True, repr=False)
class TernGrad(Quantised):
    """Every value as 0 or as the greatest magnitude with its sign, at random, in 2 bits.

    Wen et al. 2017, arXiv:1705.07878. The probability of a value x that it is not 0 is |x| divided
    by the greatest magnitude, so that its mean is the value. That magnitude is limited by gradient
    clipping before: what lies beyond ``clip`` standard deviations becomes as much. These are taken
    around 0, where the paper has the gradients' mean: so tensors of few or equal elements are not
    clipped to nothing.

    Each rank has its own scale, which costs a few bytes, and no agreement before.

    Args:
        clip: in standard deviations; None: nothing is clipped, and nothing is biased.
        per: what has a scale of its own: each ``"tensor"``, or the whole ``"bucket"``.
        seed: of the random numbers, which are others on each rank, in each step and bucket.

    Raises:
        ValueError: an argument is out of range.
    """

    clip: float | None = 2.5
    per: Literal["tensor", "bucket"] = "tensor"
    seed: int = 0

    stateful = True

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_positive("clip", self.clip)
        check_choice("per", self.per, "tensor", "bucket")
        check_count("seed", self.seed, 0)

    def parts(self, bucket: Bucket) -> Sequence[int]:
        """Each tensor, or all."""
        return bounds_of(bucket, self.per)

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """One with the rank's random numbers."""
        generator = generator_of(bucket, self.seed, rank)
        return _RandomSigns(self.clip, bucket.send.dtype, generator)


class _RandomSigns(TernaryCodec):
    def __init__(
        self, clip: float | None, dtype: np.dtype[Any], generator: np.random.Generator
    ) -> None:
        self._clip = clip
        self._dtype = dtype
        self._generator = generator
        self.head = dtype.itemsize

    def measure(self, values: Any, head: Any) -> None:
        """The greatest magnitude that is left after clipping."""
        greatest = greatest_magnitude(values)
        if self._clip is not None and greatest > 0:
            squares = 0.0
            for piece in self.pieces(values.size):
                ratios = values[piece] / greatest  # whose squares are in range
                squares += float(np.dot(ratios, ratios))
            limit = self._clip * (squares / values.size) ** 0.5
            greatest *= min(limit, 1.0)
        head[...] = np.array([greatest], self._dtype).view(np.uint8)

    def codes(self, values: Any, head: Any) -> Any:
        """Clip and round."""
        greatest = self.magnitude(head)
        ratios = values / np.where(greatest > 0, greatest, 1)
        return codes_at_random(ratios, 1, self._generator)

    def magnitude(self, head: Any) -> Any:
        """The greatest."""
        return np.frombuffer(head.tobytes(), self._dtype)
