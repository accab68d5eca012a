"""Ranks that have the same gradients are named once; others are left alone."""

import ml_dtypes
import numpy as np
import pytest

from hvdlite.gradients.same_data import UNKNOWN, DataCheck, checksum
from tests.logs import logged

A, B, C = b"aaaa", b"bbbb", b"cccc"


@pytest.mark.parametrize(
    ("exchanges", "told"),
    [
        ([[A, A], [B, B], [C, C]], "ranks 0, 1"),
        ([[A, A, B], [A, A, C], [B, B, B]], "ranks 0, 1"),
        ([[A, B, A, B], [B, A, B, A], [C, A, C, A]], "ranks 0, 2; ranks 1, 3"),
        ([[A, B, B], [B, B, B], [A, C, C]], "ranks 1, 2"),
        ([[A, A], [A, A], [A, B]], None),
        ([[A, B], [A, A], [A, A]], None),
        ([[UNKNOWN, UNKNOWN]] * 3, None),
        ([[A, A], [UNKNOWN, A], [A, A]], None),
        ([[A, A], [B, B]], None),
    ],
)
def test_ranks_that_are_the_same_in_three_exchanges(exchanges, told):
    check = DataCheck()
    with logged() as messages:
        for step, each in enumerate(exchanges, 2):
            for _ in range(3):  # one that runs again after a death counts once
                check.record(dict(enumerate(each)), step, warns=True)
    assert check.is_due == (len(exchanges) < 3)
    same = "computed the same gradients, to the bit, in steps 2 to 4: they train on the same data"
    assert len(messages) == (told is not None)
    assert all(message.startswith(f"{told} {same}") for message in messages)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("size", [0, 1, 1001, 2**20 + 1])
def test_checksums(dtype, size):
    gradients = np.zeros(size, dtype)
    assert checksum(gradients) == UNKNOWN
    seen = {UNKNOWN}
    for number in {0, min(size - 1, 1000)} if size else ():
        gradients[number] = 1
        assert checksum(gradients) == checksum(gradients.copy()) not in seen
        seen.add(checksum(gradients))
