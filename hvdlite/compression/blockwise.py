"""Gradients as 8-bit integers with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.compression.blocks import BlockCodec
from hvdlite.compression.eight_bits import EightBits

_LARGEST = 127


class _IntegerCodec(BlockCodec):
    def write_ratios(self, ratios: Any, greatest: Any, out: Any) -> Any:
        """Round."""
        ratios *= _LARGEST
        np.rint(ratios, out=ratios)
        np.copyto(out.view(np.int8), ratios, casting="unsafe")
        return greatest

    def read_ratios(self, codes: Any, out: Any) -> None:
        """Divide: 127 is exactly 1."""
        np.copyto(out, codes.view(np.int8))
        out /= _LARGEST


@dataclass(frozen=True, repr=False)
class Blockwise8(EightBits):
    """Every value as one of 255 equally spaced ones, the greatest of its block being the last.

    Dettmers et al. 2021, arXiv:2110.02861, with linear codes as DeepSpeed has them:
    round(127 x / max|x|), of two to the even one. A block of zeros stays one.

    Args:
        block: how many values have a scale in common, which is as wide as they are (16-bit
            gradients': 32 bits).

    Raises:
        ValueError: ``block`` is out of range.
    """

    block_codec = _IntegerCodec
