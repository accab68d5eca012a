"""Gradients as what the majority of ranks says of their sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.arguments import check_positive
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec
from hvdlite.compression.quantised import Quantised
from hvdlite.compression.ternary import TernaryCodec, codes_of
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport


@dataclass(frozen=True, repr=False)
class MajorityVote(Quantised):
    """Every value as the sign that most ranks have, times a constant.

    signSGD with majority vote, Bernstein et al. 2018, arXiv:1802.04434. The result is scale *
    sign(sum of the ranks' signs). A zero has no vote, and where there are as many votes for as
    against, the result is 0: no direction wins by being the default one, what has no gradient does
    not move, and a rank without data has no say. That takes 2 bits, for votes as for results,
    where a convention for zeros and ties would take 1.

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

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """The same for all ranks."""
        return _Votes()

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Add up votes, send the outcome's sign."""
        super().exchange(bucket, transport)
        np.multiply(bucket.result, self.scale, out=bucket.result)


class _Votes(TernaryCodec):
    def codes(self, values: Any, head: Any) -> Any:
        """Signs."""
        return codes_of(values > 0, values < 0)

    def magnitude(self, head: Any) -> Any:
        """One vote: whole numbers add up to exactly 0 in a tie."""
        return 1.0
