from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import (
    DENSE,
    Bucket,
    Compression,
    ErrorFeedback,
    Parameter,
    Reduction,
)
from hvdlite.compression.bucket import BucketState
from hvdlite.compression.low_rank import multiply, orthonormal
from hvdlite.errors import GradientError
from hvdlite.transport.loopback import Loopback
from tests.compression.ranks import SIZES, Ranks, gradients_of

PowerSGD = Compression.PowerSGD
SHAPES = {"a": (12, 31), "b": (40, 3, 3, 2), "c": (33, 18)}


class Reference:
    """Algorithms 1 and 2 of arXiv:1905.13727 in float64, for one matrix, with all its ranks.

    The columns of P are made orthonormal by a QR decomposition. Of the decompositions that there
    are, whose columns differ in sign, it does not matter which.
    """

    def __init__(self, start, size):
        self.q = start.astype(np.float64)
        self.errors = np.zeros(size)

    def step(self, gradients, divisor):
        given = [g.astype(np.float64) + e for g, e in zip(gradients, self.errors, strict=True)]
        p, _ = np.linalg.qr(sum(each @ self.q for each in given) / divisor)
        own = [each.T @ p for each in given]
        self.q = sum(own) / divisor
        self.errors = [each - p @ q.T for each, q in zip(given, own, strict=True)]
        return p @ self.q.T


def matrix(array):
    return array.reshape(array.shape[0], -1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("dtype", "accuracy"),
    [(np.float64, 1e-9), (np.float32, 3e-4), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)],
)
def test_steps_are_those_of_the_paper(size, op, dtype, accuracy):
    """Each step starts from the Q of the one before, and adds its residual."""
    ranks = Ranks(size, ErrorFeedback(PowerSGD(2, min_compression=1.0)), Reduction(op))
    divisor = size if op is Average else 1
    shapes = {**SHAPES, "bias": (5,)}
    ranks.step(gradients_of(size, shapes, dtype=dtype))
    # The reference takes its start, and the first step, from the strategy.
    state = ranks.states[0].state_dict()
    references = {name: Reference(state[name]["q"], size) for name in SHAPES}
    for name, reference in references.items():
        left = [each.state_dict()[name]["residual"] for each in ranks.states]
        reference.errors = [matrix(each).astype(np.float64) for each in left]
    for step in range(1, 5):
        gradients = gradients_of(size, shapes, step, dtype)
        results = ranks.step(gradients)
        for name, reference in references.items():
            expected = reference.step([matrix(each[name]) for each in gradients], divisor)
            found = matrix(results[name]).astype(np.float64)
            assert np.abs(found - expected).max() < accuracy * np.abs(expected).max()
            left = ranks.residual(name).reshape(expected.shape)
            error = sum(reference.errors)
            assert np.abs(left - error).max() < accuracy * np.abs(error).max()


def test_the_first_step_is_a_projection_of_the_average():
    """Project onto the column space of products with random vectors, in which nothing is lost."""
    size, gradients = 3, gradients_of(3, SHAPES, dtype=np.float64)
    found = Ranks(size, PowerSGD(3)).step(gradients)
    for name, result in found.items():
        average = sum(matrix(own[name]) for own in gradients) / size
        left, values, _ = np.linalg.svd(matrix(result))
        assert np.count_nonzero(values > 1e-12 * values[0]) == 3
        projection = left[:, :3] @ (left[:, :3].T @ average)
        np.testing.assert_allclose(matrix(result), projection, atol=1e-12)


@pytest.mark.parametrize(("dtype", "accuracy"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize("size", SIZES)
def test_an_average_of_lower_rank_is_exact(size, dtype, accuracy):
    """It holds even if the rank is below the number of the factors' columns."""
    draw = np.random.default_rng(size)
    left = draw.standard_normal((30, 2))
    gradients = [{"a": (left @ draw.standard_normal((2, 50))).astype(dtype)} for _ in range(size)]
    expected = np.mean([own["a"] for own in gradients], axis=0, dtype=np.float64)
    for rank in (2, 3, 5):
        ranks = Ranks(size, PowerSGD(rank, min_compression=1.0))
        for _ in range(3):
            found = ranks.step(gradients)["a"]
            assert np.abs(found - expected).max() < accuracy * np.abs(expected).max()


def test_steps_on_the_same_gradient_find_its_best_approximation():
    """Warm starts make it a power iteration; without them each step starts anew."""
    gradients = gradients_of(2, {"a": (40, 60)}, dtype=np.float64)
    average = sum(own["a"] for own in gradients) / 2
    values = np.linalg.svd(average, compute_uv=False)
    errors = {}
    for warm_start in (True, False):
        ranks = Ranks(2, PowerSGD(2, warm_start=warm_start))
        found = [ranks.step(gradients)["a"] for _ in range(150)]
        errors[warm_start] = [np.linalg.norm(each - average) for each in found]
    best = np.sqrt((values[2:] ** 2).sum())
    assert errors[True][-1] == pytest.approx(best, rel=1e-3)
    assert min(errors[False]) > 1.01 * best
    assert len(set(errors[False])) > 100  # each begins elsewhere


def test_factors_depend_on_no_bucket_and_are_as_large_as_they_say():
    together, apart = Ranks(2, PowerSGD(2)), Ranks(2, PowerSGD(2))
    gradients = gradients_of(2, SHAPES)
    results = together.step(gradients)
    for name in SHAPES:
        alone = apart.step([{name: own[name]} for own in gradients])
        np.testing.assert_array_equal(alone[name], results[name])
    calls = together.simulation.calls[0]
    # Two allreduces by slices, whatever the number of matrices, and nothing else.
    assert calls == ["alltoall"] * 4
    kept = together.states[0].state_dict()
    # State shares no memory with the arrays that are sent.
    assert _factor(together, "a", SHAPES["a"]).base is None
    assert {name: kept[name]["q"].shape for name in SHAPES} == {
        "a": (31, 2),
        "b": (18, 2),
        "c": (18, 2),
    }


def _factor(ranks, name, shape):
    return BucketState([Parameter(name, shape, np.dtype(np.float32))], ranks.states[0]).get(0, "q")


def test_another_seed_starts_elsewhere():
    gradients = gradients_of(1, SHAPES)
    results = [Ranks(1, PowerSGD(2, seed=seed)).step(gradients)["a"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() > 0.01


@pytest.mark.parametrize(
    ("shape", "pays"),
    [
        ((), False),
        ((4096,), False),
        ((64, 64), True),  # 4096 numbers, 512 in the factors
        ((16, 16), True),  # 256 and 128
        ((15, 16), False),  # 240 and 124
        ((1, 4096), False),
        ((4096, 1), False),
        ((0, 0), False),
        ((0, 64, 64), False),
        ((64, 64, 3, 3), True),
        ((3, 3, 64, 64), True),
        ((64, 1, 3, 3), False),  # 576, 292: of a convolution by channel
    ],
)
def test_only_where_it_pays(shape, pays):
    strategy = PowerSGD(4)
    for dtype in (np.float16, np.float32):
        chosen = strategy.choose(Parameter("a", shape, np.dtype(dtype)))
        assert chosen is (strategy if pays else DENSE)
    for dtype in (np.int64, np.complex64):
        assert strategy.choose(Parameter("a", shape, np.dtype(dtype))) is DENSE


def test_a_convolution_is_the_same_matrix_in_both_layouts():
    draw = np.random.default_rng(0)
    torch = draw.standard_normal((16, 8, 3, 3))  # out, in, height, width
    tensorflow = torch.transpose(2, 3, 1, 0)
    shapes = []
    for array in (torch, tensorflow):
        ranks = Ranks(1, PowerSGD(2))
        ranks.step([{"a": array}])
        shapes.append(ranks.states[0].state_dict()["a"]["q"].shape)
    assert shapes == [(72, 2), (16, 2)]


def test_a_rank_above_the_matrix_is_its_rank():
    gradients = gradients_of(2, {"a": (4, 7), "b": (5, 5)}, dtype=np.float64)
    ranks = Ranks(2, PowerSGD(9, min_compression=0.1))
    for name, result in ranks.step(gradients).items():
        np.testing.assert_allclose(result, (gradients[0][name] + gradients[1][name]) / 2)
    kept = ranks.states[0].state_dict()
    assert (kept["a"]["q"].shape, kept["b"]["q"].shape) == ((7, 4), (5, 5))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_are_zeros_and_not_for_ever(dtype):
    """A low rank is not for ever, either, although Q starts from where it ended."""
    shapes = {"a": (20, 30)}
    ranks = Ranks(2, ErrorFeedback(PowerSGD(2)))
    zeros = [{"a": np.zeros((20, 30), dtype)}] * 2
    assert not ranks.step(zeros)["a"].any()
    assert not ranks.residual("a").any()
    one = [{"a": np.outer(np.arange(20), np.arange(30)).astype(dtype)}] * 2
    assert np.linalg.matrix_rank(ranks.step(one)["a"], rtol=1e-4) == 1
    many = gradients_of(2, shapes, dtype=dtype)
    assert np.linalg.matrix_rank(ranks.step(many)["a"], rtol=1e-4) == 2


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_stands_in_has_no_factor_and_disturbs_none(size):
    """A rank that has joined sends zeros, and the others see it as one with zeros all the time."""
    results = []
    for forgets in (False, True):
        ranks = Ranks(size, PowerSGD(2))
        ranks.step(gradients_of(size, SHAPES))
        gradients = gradients_of(size, SHAPES, 1)
        for array in gradients[-1].values():
            array[...] = 0
        if forgets:
            ranks.states[-1].load_state_dict({})
        results.append(ranks.step(gradients))
    for name in SHAPES:
        np.testing.assert_array_equal(results[0][name], results[1][name])


def test_it_is_refused_where_products_do_not_tell(monkeypatch):
    """Some libraries do not multiply by 0."""
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, *others, **out: matmul(_finite(a), *others, **out))
    gradients = gradients_of(2, SHAPES)
    gradients[0]["a"][2, 2] = np.nan
    with pytest.raises(GradientError, match="'a' is not finite on rank 0"):
        Ranks(2, PowerSGD(2)).step(gradients)


def _finite(array):
    return np.where(np.isfinite(array), array, 0)


def test_a_product_out_of_range_is_refused_by_name():
    gradients = gradients_of(2, SHAPES)
    for own in gradients:
        own["c"][...] = 3e38
    with pytest.raises(GradientError, match=r"'c' is too large for PowerSGD\(rank=2"):
        Ranks(2, PowerSGD(2)).step(gradients)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_a_scale_is_nothing_but_a_scale(scale):
    """Squares of such values are out of float32's range."""
    ranks = Ranks(2, PowerSGD(2)), Ranks(2, PowerSGD(2))
    for step in range(3):
        gradients = gradients_of(2, {"a": (20, 30)}, step)
        scaled = [{"a": own["a"] * np.float32(scale)} for own in gradients]
        expected = ranks[0].step(gradients)["a"].astype(np.float64)
        found = ranks[1].step(scaled)["a"].astype(np.float64) / np.float32(scale)
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_a_state_of_another_rank_is_no_start():
    gradients = gradients_of(2, SHAPES)
    earlier, later = Ranks(2, PowerSGD(3)), Ranks(2, PowerSGD(2))
    earlier.step(gradients)
    later.states = earlier.states
    later.step(gradients)
    assert later.states[0].state_dict()["a"]["q"].shape == (31, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(700, 400), (9, 2**17 + 5), (1, 1), (3, 2)])
def test_factors_are_multiplied_in_one_order(shape, dtype):
    """The bits are those of one rounded operation after the other, on any processor."""
    draw = np.random.default_rng(0)
    p, q = (draw.standard_normal((length, 3)).astype(dtype) for length in shape)
    found = np.empty(shape, dtype)
    multiply(p, q, found)
    first, second, third = (np.outer(p[:, n], q[:, n]) for n in range(3))
    np.testing.assert_array_equal(found, (first + second) + third)


_DIGEST = """
import hashlib
import numpy as np
from hvdlite.compression.low_rank import multiply, orthonormal

draw = np.random.default_rng(0)
p, q = (draw.standard_normal((length, 5)).astype(np.float32) for length in (1003, 517))
out = np.empty((1003, 517), np.float32)
basis = orthonormal(p)
multiply(basis.astype(np.float32), q, out)
print(hashlib.sha256(basis.tobytes() + out.tobytes()).hexdigest())
"""


def test_results_do_not_depend_on_the_processor():
    """Tell numpy and its library to use only the instructions of an older processor."""
    older = {
        "OPENBLAS_CORETYPE": "Sandybridge",
        # By the names of earlier and of later versions.
        "NPY_DISABLE_CPU_FEATURES": "FMA3 AVX2 AVX512F AVX512CD AVX512_SKX AVX512_ICL AVX512_SPR"
        " X86_V3 X86_V4",
    }
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _DIGEST],
            env={**os.environ, **settings},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for settings in ({}, older)
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_orthonormal_columns():
    draw = np.random.default_rng(0)
    for shape in ((7, 3), (1, 1), (1000, 8), (5, 5)):
        vectors = draw.standard_normal(shape) * 10.0 ** draw.integers(-200, 200, shape[1])
        found = orthonormal(vectors)
        np.testing.assert_allclose(found.T @ found, np.eye(shape[1]), atol=1e-14)
        q, r = np.linalg.qr(vectors / np.abs(vectors).max(axis=0))
        np.testing.assert_allclose(found, q * np.sign(np.diagonal(r)), atol=1e-10)


def test_orthonormal_columns_of_nearly_parallel_vectors():
    """One pass of Gram and Schmidt would leave them far from orthonormal."""
    draw = np.random.default_rng(0)
    base = draw.standard_normal((50, 1))
    found = orthonormal(base + 1e-10 * draw.standard_normal((50, 4)))
    np.testing.assert_allclose(found.T @ found, np.eye(4), atol=1e-14)


def test_columns_that_others_span_are_0():
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((20, 5)).astype(np.float32)
    vectors[:, 1] = 0
    vectors[:, 3] = vectors[:, 0] - 2 * vectors[:, 2]
    found = orthonormal(vectors)
    expected = np.diag([1.0, 0.0, 1.0, 0.0, 1.0])
    np.testing.assert_allclose(found.T @ found, expected, atol=1e-12)


def test_memory_is_for_factors_and_a_piece():
    parameters = [Parameter(str(n), (1024, 1024), np.dtype(np.float32)) for n in range(3)]
    bucket = Bucket(parameters, Reduction())
    bucket.send[...] = np.random.default_rng(0).standard_normal(bucket.send.size)
    bucket.unsent = np.empty_like(bucket.send)
    strategy, transport = PowerSGD(4), Loopback()
    tracemalloc.start()
    try:
        strategy.exchange(bucket, transport)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * bucket.send.nbytes
