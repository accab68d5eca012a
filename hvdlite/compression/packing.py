"""Packing of 1-, 2-, 4- and 8-bit codes into bytes, by vectorised arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

# A multiplication brings the codes in the bytes of a word together in its uppermost byte.
_GATHER = {
    2: (np.dtype("<u4"), np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6), np.uint32(24)),
    4: (np.dtype("<u2"), np.uint16(1 << 8 | 1 << 4), np.uint16(8)),
}


def packed_size(count: int, bits: int) -> int:
    """Return the number of bytes for ``count`` codes of ``bits`` bits each."""
    return -(-count * bits // 8)


def pack(codes: Any, bits: int, out: Any) -> None:
    """Write codes side by side, the first one in the lowest bits of a byte.

    Args:
        codes: flat, uint8 (1-bit codes: bool, too), each below ``2**bits``.
        bits: 1, 2, 4 or 8.
        out: flat, uint8, of `packed_size` bytes; unused bits become 0.
    """
    if bits == 8:
        out[...] = codes
    elif bits == 1:
        out[...] = np.packbits(codes, bitorder="little")
    else:
        each = 8 // bits
        whole = codes.size // each
        word, factor, shift = _GATHER[bits]
        np.copyto(out[:whole], codes[: whole * each].view(word) * factor >> shift, casting="unsafe")
        if codes.size > whole * each:
            last = np.zeros(each, np.uint8)
            last[: codes.size - whole * each] = codes[whole * each :]
            pack(last, bits, out[whole:])


def unpack(values: Sequence[float], packed: Any, out: Any) -> None:
    """Write the value of each packed code.

    Args:
        values: of all codes: 2, 4, 16 or 256 of them, from which the bits of a code follow.
        packed: flat, uint8, as `pack` writes it.
        out: flat, of any dtype; its size is the number of codes.
    """
    table = _table(tuple(values), out.dtype)
    each = table.shape[1]
    whole = out.size // each
    # Without "clip" numpy first searches for indices out of range; there are none.
    np.take(
        table, packed[:whole], axis=0, out=out[: whole * each].reshape(whole, each), mode="clip"
    )
    if out.size > whole * each:
        out[whole * each :] = table[packed[whole]][: out.size - whole * each]


@lru_cache
def _table(values: tuple[float, ...], dtype: np.dtype[Any]) -> Any:
    """Return a row of values for each byte."""
    bits = (len(values) - 1).bit_length()
    shifts = np.arange(0, 8, bits)
    codes = np.arange(256)[:, None] >> shifts & (len(values) - 1)
    return np.array(values, dtype)[codes]
