from __future__ import annotations

import numpy as np
import pytest

from hvdlite.compression.packing import pack, packed_size, unpack

BITS = [1, 2, 4, 8]
COUNTS = [*range(18), 1001]


def by_hand(codes, bits):
    """Pack bit by bit, the lowest first."""
    number = sum(int(code) << bits * place for place, code in enumerate(codes))
    return number.to_bytes((len(codes) * bits + 7) // 8, "little")


@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_side_by_side_and_come_back_as_what_they_stand_for(bits):
    for count in COUNTS:
        codes = np.random.default_rng(count).integers(0, 2**bits, count, np.uint8)
        packed = np.full(packed_size(count, bits), 0xA5, np.uint8)
        pack(codes, bits, packed)
        assert packed.tobytes() == by_hand(codes.tolist(), bits), count
        unaligned = np.frombuffer(b"\x55" + packed.tobytes(), np.uint8)[1:]
        values = np.arange(2**bits) / 3 - 5
        for dtype in (np.float32, np.float64):
            out = np.full(count, np.nan, dtype)
            unpack(values.tolist(), unaligned, out)
            np.testing.assert_array_equal(out, values[codes].astype(dtype))
