"""Strategies that send signs: one or two bits for each value."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdlite.base.arguments import check_choice, check_count, check_positive
from hvdlite.base.reduction import ReduceOp
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import greatest_magnitude
from hvdlite.compression.packing import pack, packed_size, unpack
from hvdlite.compression.quantized import Quantized, round_stochastically
from hvdlite.transport import Transport

# The values of two-bit codes; the fourth code is never written.
_TERNARY = (-1.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True, repr=False)
class Sign(Quantized):
    """Send signs, in 1 bit, and the mean magnitude.

    signSGD, Bernstein et al. 2018, arXiv:1802.04434, with the scale of Karimireddy et al. 2019,
    arXiv:1901.09847, who show that it needs `ErrorFeedback` to converge. Of n values x, a rank
    sends sign(x) and the sum of ``|x| / n``; the result is the ranks' average of the products.
    Zeros count as positive, since there is no third sign; a tensor of zeros stays zero.

    Args:
        per: whether each ``"tensor"`` has a scale of its own, or the whole ``"bucket"`` has one.

    Raises:
        ValueError: ``per`` is neither.
    """

    per: Literal["tensor", "bucket"] = "tensor"

    def __post_init__(self) -> None:
        check_choice("per", self.per, "tensor", "bucket")

    def head(self, dtype: np.dtype[Any]) -> int:
        return dtype.itemsize

    def body(self, count: int, dtype: np.dtype[Any]) -> int:
        return packed_size(count, 1)

    def measure(self, values: Any, head: Any) -> None:
        mean = self._mean(values, 1)
        if not mean < np.inf:  # the sum, not the mean, is out of the type's range
            greatest = greatest_magnitude(values)
            mean = greatest * self._mean(values, greatest)
        head[...] = np.array([mean], values.dtype).view(np.uint8)

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        """Compare, so that a negative zero is a zero."""
        pack(values < 0, 1, out)

    def read(self, body: Any, head: Any, out: Any) -> None:
        unpack((1.0, -1.0), body, out)
        out *= np.frombuffer(head.tobytes(), out.dtype)

    def _mean(self, values: Any, unit: float) -> float:
        total = 0.0
        for piece in self.pieces(values.size):
            magnitudes = np.abs(values[piece])
            if unit != 1:
                magnitudes /= unit
            total += float(np.add.reduce(magnitudes))
        return total / max(len(values), 1)


class Ternary(Quantized):
    """Base of strategies that send each value as -1, 0 or 1 times one magnitude, in 2 bits."""

    def body(self, count: int, dtype: np.dtype[Any]) -> int:
        return packed_size(count, 2)

    def read(self, body: Any, head: Any, out: Any) -> None:
        unpack(_TERNARY, body, out)
        out *= self.magnitude(head, out.dtype)

    @abstractmethod
    def magnitude(self, head: Any, dtype: np.dtype[Any]) -> Any:
        """Return the magnitude of values of a dtype, from the message's head."""


def _write_ternary(positive: Any, negative: Any, out: Any) -> None:
    """Write the codes of values, given which of them become positive and which negative."""
    codes = positive.view("u1") + 1
    codes -= negative.view("u1")
    pack(codes, 2, out)


@dataclass(frozen=True, repr=False)
class TwoBit(Ternary):
    """Send -threshold, 0 or threshold, in 2 bits, as MXNet does.

    Values of at least the threshold become the threshold, those of at most its negative become
    that, and all others become 0. MXNet feeds back the rest: ``ErrorFeedback(TwoBit(0.5))``;
    without that most values are never sent.

    Args:
        threshold: in the units of the gradients.

    Raises:
        ValueError: ``threshold`` is not a number above 0.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_positive("threshold", self.threshold)

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        _write_ternary(values >= self.threshold, values <= -self.threshold, out)

    def magnitude(self, head: Any, dtype: np.dtype[Any]) -> Any:
        return self.threshold


@dataclass(frozen=True, repr=False)
class MajorityVote(Ternary):
    """Send signs; the result is the sign that most ranks have, times a constant.

    signSGD with majority vote, Bernstein et al. 2018, arXiv:1802.04434 and arXiv:1810.05291. The
    result is scale * sign(sum of the ranks' signs). A zero has no vote, and a tie gives 0: no
    direction wins by default, parameters without a gradient do not move, and a rank without data
    has no say. That takes 2 bits, for votes as for results, where a convention for zeros and ties
    would take 1.

    Every rank has one vote, whatever its ``batch_size`` (but none if that is 0). It is not linear,
    so there is nothing to feed back. As all values have one magnitude, learning rates are those of
    sign methods: much smaller than those of SGD.

    Args:
        scale: the magnitude of the result.

    Raises:
        ValueError: ``scale`` is not a number above 0.
    """

    scale: float = 1.0

    ops = (ReduceOp.AVERAGE,)
    tells_unsent = False
    by_slices = True

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        _write_ternary(values > 0, values < 0, out)

    def magnitude(self, head: Any, dtype: np.dtype[Any]) -> Any:
        """Return one vote: integers add up to exactly 0 in a tie."""
        return 1.0

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        super().exchange(bucket, transport)
        np.multiply(bucket.result, self.scale, out=bucket.result)


@dataclass(frozen=True, repr=False)
class TernGrad(Ternary):
    """Send -1, 0 or 1 times a scale, chosen stochastically, in 2 bits.

    Wen et al. 2017, arXiv:1705.07878. The scale is the greatest magnitude, and a value x becomes 0
    or the scale with its sign: with a probability of ``|x|`` divided by the scale, so that its mean
    is the value. The scale is limited by gradient clipping: values beyond ``clip`` standard
    deviations are clipped to these. Deviations are taken around 0, instead of around the gradients'
    mean as in the paper, so that tensors of few or equal elements are not clipped to nothing.

    Each rank has its own scale, which costs a few bytes, but no agreement in advance.

    Args:
        clip: in standard deviations; None: nothing is clipped, and nothing is biased.
        per: whether each ``"tensor"`` has a scale of its own, or the whole ``"bucket"`` has one.
        seed: of the random numbers, which differ by rank, step and bucket.

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

    def head(self, dtype: np.dtype[Any]) -> int:
        return dtype.itemsize

    def measure(self, values: Any, head: Any) -> None:
        """Write the greatest magnitude after clipping."""
        greatest = greatest_magnitude(values)
        if self.clip is not None and greatest > 0:
            squares = 0.0
            for piece in self.pieces(values.size):
                ratios = values[piece] / greatest  # whose squares are in range
                squares += float(np.dot(ratios, ratios))
            limit = self.clip * (squares / values.size) ** 0.5
            greatest *= min(limit, 1.0)
        head[...] = np.array([greatest], values.dtype).view(np.uint8)

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        greatest = self.magnitude(head, values.dtype)
        ratios = values / np.where(greatest > 0, greatest, 1)
        pack(round_stochastically(ratios, 1, generator), 2, out)

    def magnitude(self, head: Any, dtype: np.dtype[Any]) -> Any:
        return np.frombuffer(head.tobytes(), dtype)
