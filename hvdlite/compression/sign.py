"""Gradients as their signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdlite.arguments import check_choice
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec, greatest_magnitude
from hvdlite.compression.packing import pack, packed_size, unpack
from hvdlite.compression.quantised import Quantised, bounds_of


@dataclass(frozen=True, repr=False)
class Sign(Quantised):
    """Every value as its sign, 1 bit, times the mean magnitude of all of them.

    signSGD, Bernstein et al. 2018, arXiv:1802.04434, with the scale of Karimireddy et al. 2019,
    arXiv:1901.09847, who show that it needs `ErrorFeedback` to converge. Of n values x, a rank
    sends sign(x) and the sum of |x| / n; the result is the ranks' average of the products. Zeros
    count as positive, since there is no third sign; a tensor of nothing but zeros stays one.

    Args:
        per: what has a scale of its own: each ``"tensor"``, or the whole ``"bucket"``.

    Raises:
        ValueError: ``per`` is neither.
    """

    per: Literal["tensor", "bucket"] = "tensor"

    def __post_init__(self) -> None:
        check_choice("per", self.per, "tensor", "bucket")

    def parts(self, bucket: Bucket) -> Sequence[int]:
        """Each tensor, or all."""
        return bounds_of(bucket, self.per)

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """The same for all ranks."""
        return _SignCodec(bucket.send.dtype)


class _SignCodec(Codec):
    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.head = dtype.itemsize

    def body(self, count: int) -> int:
        """One bit each."""
        return packed_size(count, 1)

    def measure(self, values: Any, head: Any) -> None:
        """The mean magnitude."""
        mean = self._mean(values, 1)
        if not mean < np.inf:  # the sum, not the mean, is more than the type holds
            greatest = greatest_magnitude(values)
            mean = greatest * self._mean(values, greatest)
        head[...] = np.array([mean], self._dtype).view(np.uint8)

    def write(self, values: Any, head: Any, out: Any) -> None:
        """Compare, so that a negative zero is a zero."""
        pack(values < 0, 1, out)

    def read(self, body: Any, head: Any, out: Any) -> None:
        """Signs times the mean."""
        unpack((1.0, -1.0), body, out)
        out *= np.frombuffer(head.tobytes(), self._dtype)

    def _mean(self, values: Any, unit: float) -> float:
        total = 0.0
        for piece in self.pieces(values.size):
            magnitudes = np.abs(values[piece])
            if unit != 1:
                magnitudes /= unit
            total += float(np.add.reduce(magnitudes))
        return total / max(len(values), 1)
