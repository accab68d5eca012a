from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.settings import Settings
from hvdlite.compression import DENSE, Parameter
from hvdlite.gradients.plan import ALIGNMENT, plan_for


def parameters(*sizes, dtype="float32"):
    return [Parameter(str(number), (size,), np.dtype(dtype)) for number, size in enumerate(sizes)]


def plan(parameters, cap, first_cap):
    return plan_for(parameters, DENSE, Settings(fusion_threshold=cap, first_bucket_size=first_cap))


@pytest.mark.parametrize(
    ("sizes", "cap", "first_cap", "expected"),
    [
        # Of 4, 8, 40, 40, 40 and 4 bytes, backwards, and the first bucket is small.
        ((1, 2, 10, 10, 10, 1), 80, 8, [[5, 4], [3, 2], [1, 0]]),
        ((1, 1, 1), 4, 100, [[2], [1], [0]]),  # the first cap is never above the cap
        ((1, 0, 5), 0, 0, [[2], [1], [0]]),  # without fusion each has its own
        ((1, 1000, 1), 100, 1, [[2], [1], [0]]),  # a large one ends its bucket
        ((), 100, 1, []),
    ],
)
def test_sizes_and_caps(sizes, cap, first_cap, expected):
    assert plan(parameters(*sizes), cap=cap, first_cap=first_cap) == expected


def test_a_bucket_has_one_dtype():
    mixed = parameters(1, 1, 1, 1)
    mixed[1] = mixed[3] = Parameter("half", (1,), np.dtype(np.float16))
    assert plan(mixed, cap=100, first_cap=100) == [[3, 1], [2, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_every_parameter_is_in_one_bucket(seed):
    generator = np.random.default_rng(seed)
    kinds = [np.dtype(kind) for kind in (np.float16, np.float32, np.float64)]
    made = [
        Parameter("", (int(generator.integers(0, 50)),), kinds[generator.integers(0, 3)])
        for _ in range(int(generator.integers(1, 60)))
    ]
    packed = plan(made, cap=int(generator.integers(0, 500)), first_cap=64)
    assert sorted(member for bucket in packed for member in bucket) == list(range(len(made)))
    for bucket in packed:
        aligned = [member for member in bucket if made[member].nbytes % ALIGNMENT == 0]
        rest = [member for member in bucket if member not in aligned]
        assert bucket == sorted(aligned, reverse=True) + sorted(rest, reverse=True)
        assert len({made[member].dtype for member in bucket}) == 1


def test_in_a_bucket_what_keeps_the_others_aligned_comes_first():
    assert plan(parameters(16, 10, 32, 3, 48), cap=10**6, first_cap=10**6) == [[4, 2, 0, 3, 1]]
