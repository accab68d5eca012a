"""Ranks that have the same gradients, or divide the data differently, are named once."""

import ml_dtypes
import numpy as np
import pytest

from hvdlite.gradients.same_data import UNKNOWN, DataCheck, checksum
from hvdlite.world import membership
from tests.logs import logged

A, B, C = b"aaaa----", b"bbbb----", b"cccc----"


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


@pytest.mark.parametrize(
    ("exchanges", "told"),
    [
        ([["a", "b"]] * 3, "rank 0 and rank 1"),
        ([["a", "b", "a"], ["b", "a", "b"], ["a", "c", "a"]], "ranks 0, 2 and rank 1"),
        ([["a", "b"], ["a", "a"], ["a", "b"]], None),
        ([["a", "b"], ["", "b"], ["a", "b"]], None),
        ([["", ""]] * 3, None),
        ([["a", "", "a"]] * 3, None),
        ([["a", "a"]] * 3, None),
    ],
)
def test_ranks_that_divide_their_data_differently_in_three_exchanges(exchanges, told, monkeypatch):
    gradients = np.ones(3)
    check = DataCheck()
    with logged() as messages:
        for step, each in enumerate(exchanges, 2):
            found = {}
            for rank, division in enumerate(each):
                monkeypatch.setattr(membership, "division", division or None)
                found[rank] = checksum(gradients * (1 + rank))
            check.record(found, step, warns=True)
    assert len(messages) == (told is not None)
    wanted = f"{told} divide the data differently in steps 2 to 4, so that some samples come twice"
    assert all(message.startswith(wanted) for message in messages)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("size", [0, 1, 1001, 2**20 + 1])
def test_checksums(dtype, size, monkeypatch):
    monkeypatch.setattr(membership, "division", None)
    gradients = np.zeros(size, dtype)
    assert checksum(gradients) == UNKNOWN
    seen = {UNKNOWN}
    for number in {0, min(size - 1, 1000)} if size else ():
        gradients[number] = 1
        assert checksum(gradients) == checksum(gradients.copy()) not in seen
        seen.add(checksum(gradients))
