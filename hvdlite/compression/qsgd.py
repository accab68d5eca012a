"""Gradients as one of a few levels, at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.arguments import check_count
from hvdlite.compression.blocks import LARGEST_BLOCK, BlockCodec, by_block
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec
from hvdlite.compression.packing import pack, unpack
from hvdlite.compression.quantised import Quantised, generator_of
from hvdlite.compression.stochastic import codes_at_random

_MOST_LEVELS = 127


@dataclass(frozen=True, repr=False)
class QSGD(Quantised):
    """Every value as a multiple of a part of its block's norm, rounded at random without bias.

    Alistarh et al. 2017, arXiv:1610.02132: |x| / norm is rounded up or down to one of the numbers
    0, 1/levels, 2/levels, ..., 1, so that its mean is the value; norms are Euclidean. Instead of
    the paper's Elias code each value takes 2 bits (1 level), 4 (up to 7 levels) or 8 (up to 127).
    A norm that is more than the type holds leaves infinities or NaN in its block.

    Args:
        levels: above 0; 1, 7 and 127 make the most of the bits.
        block: how many values have a norm in common; the error grows with its square root. A norm
            is as wide as values are (16-bit gradients': 32 bits).
        seed: of the random numbers, which are others on each rank, in each step and bucket.

    Raises:
        ValueError: an argument is out of range.
    """

    levels: int = 7
    block: int = 512
    seed: int = 0

    stateful = True

    def __post_init__(self) -> None:
        check_count("levels", self.levels, 1, _MOST_LEVELS)
        check_count("block", self.block, 1, LARGEST_BLOCK)
        check_count("seed", self.seed, 0)

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """One with the rank's random numbers."""
        generator = generator_of(bucket, self.seed, rank)
        return _LevelCodec(self.levels, self.block, bucket.send.dtype, generator)


class _LevelCodec(BlockCodec):
    def __init__(
        self, levels: int, block: int, dtype: np.dtype[Any], generator: np.random.Generator
    ) -> None:
        bits = 2 if levels == 1 else 4 if levels <= 7 else 8
        super().__init__(block, bits, dtype)
        self._levels = levels
        self._values = tuple((code - levels) / levels for code in range(2**bits))
        self._generator = generator

    def write_ratios(self, ratios: Any, greatest: Any, out: Any) -> Any:
        """Divide by the norm, too, and round."""
        starts = np.arange(0, ratios.size, self.block)
        norms = np.sqrt(np.add.reduceat(ratios * ratios, starts))
        by_block(np.divide, ratios, np.where(norms == 0, 1, norms) / self._levels, self.block)
        pack(codes_at_random(ratios, self._levels, self._generator), self._bits, out)
        return greatest * norms

    def read_ratios(self, codes: Any, out: Any) -> None:
        """Look up."""
        unpack(self._values, codes, out)
