from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import (
    Bucket,
    DeepGradientCompression,
    Parameter,
    Reduction,
    exchange_bucket,
)
from hvdlite.transport.loopback import Loopback
from tests.compression.ranks import SIZES, Ranks, gradients_of
from tests.compression.sparse_references import DTYPES, SHAPES, keep, largest
from tests.references import dtype_of


class Paper:
    """Lin et al. 2018, arXiv:1712.01887, algorithm 4 and section 3, for all ranks, in float64.

    There a rank's gradient is divided by the number of ranks, and all are added up.
    """

    def __init__(self, size, percent, momentum, clip=None, masking=True):
        self.size, self.percent, self.momentum, self.clip = size, percent, momentum, clip
        self.masking = masking
        self.u = [{} for _ in range(size)]
        self.v = [{} for _ in range(size)]

    def step(self, gradients):
        """Return the sum of the ranks' entries that are sent, by name."""
        sums = {name: np.zeros(np.shape(each)) for name, each in gradients[0].items()}
        for rank in range(self.size):
            own = {name: np.asarray(g, np.float64) for name, g in gradients[rank].items()}
            norm = np.sqrt(sum((g**2).sum() for g in own.values()))
            factor = 1.0
            if self.clip is not None and norm > self.clip * self.size**-0.5:
                factor = self.clip * self.size**-0.5 / norm
            for name, gradient in own.items():
                u = self.momentum * self.u[rank].get(name, 0) + factor * gradient
                v = self.v[rank].get(name, 0) + u
                count = -(-v.size * self.percent // 100)
                sent = keep(v.ravel(), largest(v.ravel(), count)).reshape(v.shape)
                mask = keep(np.ones(v.size), largest(v.ravel(), count)).reshape(v.shape)
                sums[name] += sent
                self.v[rank][name] = v * (1 - mask)
                self.u[rank][name] = u * (1 - mask) if self.masking else u
        return sums


def state_of(ranks, rank):
    return {
        (name, key): array
        for name, entry in ranks.states[rank].state_dict().items()
        for key, array in entry.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("momentum", "clip", "masking"),
    [(0.0, None, True), (0.0, 3.0, False), (0.9, None, False), (0.9, 3.0, True), (0.9, 1e6, True)],
)
def test_the_algorithm_of_the_paper(size, op, momentum, clip, masking):
    divisor = size if op is Average else 1
    paper = Paper(size, 10, momentum, clip, masking)
    strategy = DeepGradientCompression(0.1, momentum, clip_norm=clip, masking=masking)
    ranks = Ranks(size, strategy, Reduction(op))
    for step in range(6):
        gradients = gradients_of(size, SHAPES, step, np.float64)
        shares = [{name: g / divisor for name, g in own.items()} for own in gradients]
        expected = paper.step(shares)
        for name, result in ranks.step(gradients).items():
            np.testing.assert_allclose(result, expected[name], 1e-9, 1e-9)
    for rank in range(size):
        for name in SHAPES:
            state = state_of(ranks, rank)
            velocity, accumulated = state[name, "velocity"], state[name, "accumulated"]
            np.testing.assert_allclose(velocity, divisor * paper.u[rank][name], 1e-9, 1e-9)
            np.testing.assert_allclose(accumulated, divisor * paper.v[rank][name], 1e-9, 1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_all_types(dtype):
    paper = Paper(2, 10, 0.9)
    ranks = Ranks(2, DeepGradientCompression(0.1))
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for step in range(4):
        gradients = gradients_of(2, SHAPES, step, dtype_of(dtype))
        shares = [{name: g.astype(np.float64) / 2 for name, g in own.items()} for own in gradients]
        expected = paper.step(shares)
        for name, result in ranks.step(gradients).items():
            assert result.dtype == dtype_of(dtype)
            scale = max(np.abs(expected[name]).max(initial=0), 1e-30)
            found = result.astype(np.float64) / scale
            np.testing.assert_allclose(found, expected[name] / scale, atol=tolerance)
    kept = state_of(ranks, 0)["a", "velocity"].dtype
    assert kept == (np.float64 if dtype == "float64" else np.float32)


def test_what_a_rank_has_no_gradient_of_goes_on_with_its_momentum():
    ranks = Ranks(1, DeepGradientCompression(0.5, momentum=0.5))
    assert ranks.step([{"a": np.array([4.0, 8.0])}])["a"].tolist() == [0, 8]
    assert ranks.step([{"a": np.zeros(2)}])["a"].tolist() == [4 + 2, 0]


def test_weighted_gradients():
    """Weighted gradients are in the memory of the result."""
    bucket = Bucket([Parameter("a", (3,), np.dtype(np.float64))], Reduction())
    bucket.send[...] = [4, 8, 2]
    for expected in ([0, 4, 0], [3 + 2, 0, 0]):
        exchange_bucket(DeepGradientCompression(0.1, momentum=0.5), bucket, Loopback(), 0.5)
        assert bucket.result.tolist() == expected
        bucket.send[...] = [4, 0, 0]


def test_warm_up():
    """Each step sends 0.25 * (0.001 / 0.25) ** (step / 4) of all; the paper counts epochs."""
    strategy = DeepGradientCompression(0.001, warm_up_steps=4, warm_up_ratio=0.25)
    ranks = Ranks(1, strategy)
    counts = []
    for step in range(6):
        found = ranks.step(gradients_of(1, {"a": (10000,)}, step))["a"]
        counts.append(np.count_nonzero(found))
    assert counts == [2500, 629, 159, 40, 10, 10]


@pytest.mark.parametrize(
    ("value", "dtype", "clip"),
    [(3e38, "float32", 1.0), (1e-30, "float32", 1e-31), (1e200, "float64", 2.0)],
)
def test_clipping_where_squares_are_out_of_range(value, dtype, clip):
    """Use a triangle of 3, 4 and 5."""
    gradient = np.array([0.75, -1.0], dtype) * np.array(value, dtype)
    found = Ranks(1, DeepGradientCompression(1.0, clip_norm=clip)).step([{"a": gradient}])["a"]
    np.testing.assert_allclose(found, [0.6 * clip, -0.8 * clip], 1e-6)
