"""Values in blocks, each of which has a scale of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from hvdlite.compression.codec import Codec
from hvdlite.compression.packing import packed_size

#: Values in the largest block that can be asked for.
LARGEST_BLOCK = 2**16


def by_block(ufunc: np.ufunc, values: Any, scales: Any, block: int) -> None:
    """Do ``ufunc(values, scale of their block)`` in place.

    Args:
        ufunc: of two operands.
        values: flat.
        scales: one for each block, the last of which may not be full.
        block: how many values it has.
    """
    whole = values.size // block
    rows, rest = values[: whole * block].reshape(whole, block), values[whole * block :]
    ufunc(rows, scales[:whole, None], out=rows)
    ufunc(rest, scales[whole:], out=rest)


class BlockCodec(Codec):
    """Values as codes of some bits, relative to a scale of each block in the values' own dtype.

    A message is that of its pieces, each of which is all scales and then all codes.

    Args:
        block: how many values have a scale in common.
        bits: of a code.
        dtype: of the values.
    """

    def __init__(self, block: int, bits: int, dtype: np.dtype[Any]) -> None:
        self.block = block
        self._bits = bits
        self._dtype = dtype

    def body(self, count: int) -> int:
        """Scales and codes."""
        return self._scales(count) + packed_size(count, self._bits)

    def write(self, values: Any, head: Any, out: Any) -> None:
        """Divide by the greatest magnitude of a block, so that nothing overflows or underflows."""
        starts = np.arange(0, values.size, self.block)
        ratios = np.abs(values)
        greatest = np.maximum.reduceat(ratios, starts)
        ratios[...] = values
        by_block(np.divide, ratios, np.where(greatest == 0, 1, greatest), self.block)
        end = self._scales(values.size)
        scales = self.write_ratios(ratios, greatest, out[end:])
        out[:end] = scales.view(np.uint8)

    def read(self, body: Any, head: Any, out: Any) -> None:
        """Multiply by the scales."""
        end = self._scales(out.size)
        scales = np.frombuffer(body[:end].tobytes(), self._dtype)
        self.read_ratios(body[end:], out)
        by_block(np.multiply, out, scales, self.block)

    @abstractmethod
    def write_ratios(self, ratios: Any, greatest: Any, out: Any) -> Any:
        """Write codes, and return the blocks' scales.

        Args:
            ratios: of the values to the greatest magnitude in their block; they may be changed.
            greatest: these magnitudes.
            out: where the codes go; flat, uint8.
        """

    @abstractmethod
    def read_ratios(self, codes: Any, out: Any) -> None:
        """Write what codes stand for, relative to the scales."""

    def _scales(self, count: int) -> int:
        return -(-count // self.block) * self._dtype.itemsize
