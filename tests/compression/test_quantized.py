"""Properties of all strategies that send every value in a few bits."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Sum
from hvdlite.compression import (
    QSGD,
    Blockwise8,
    Bucket,
    Float8,
    MajorityVote,
    Natural,
    Parameter,
    Reduction,
    Sign,
    TernGrad,
    TwoBit,
    check_op,
)
from hvdlite.transport.loopback import Loopback
from tests.compression.ranks import SIZES, Ranks, gradients_of

LINEAR = [
    Float8(8),
    Blockwise8(8),
    Sign(),
    Sign("bucket"),
    TwoBit(0.5),
    QSGD(1, 8),
    QSGD(7, 8),
    QSGD(127, 8),
    TernGrad(),
    TernGrad(None, "bucket"),
    Natural(),
]
STRATEGIES = [*LINEAR, MajorityVote()]
RANDOM = [strategy for strategy in STRATEGIES if strategy.stateful]
SHAPES = {"a": (5, 7), "b": (), "c": (0, 3), "d": (1,), "e": (31,)}

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
every_random = pytest.mark.parametrize("strategy", RANDOM, ids=repr)


def bucket_of(array, unsent=False, name="a"):
    array = np.asarray(array)
    bucket = Bucket([Parameter(name, array.shape, array.dtype)], Reduction())
    bucket.send_slot(0)[...] = array
    bucket.unsent = np.full(array.size, np.nan, array.dtype) if unsent else None
    return bucket


def coded(strategy, array, count=0, rank=0, name="a"):
    """Return the message of a rank."""
    bucket = bucket_of(array, name=name)
    bucket.count = count
    generator = None if strategy.seed is None else bucket.generator(strategy.seed, rank)
    message = np.empty(strategy.nbytes(bucket.send.size, bucket.send.dtype), np.uint8)
    strategy.encode(bucket.send, message, generator)
    return message.tobytes()


def normal(count, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


@every_strategy
@pytest.mark.parametrize("size", SIZES)
def test_results_have_the_dtype_and_are_alike_and_near(strategy, size):
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        gradients = gradients_of(size, SHAPES, dtype=dtype)
        for name, result in Ranks(size, strategy).step(gradients).items():
            parts = [each[name].astype(np.float64) for each in gradients]
            assert (result.shape, result.dtype) == (SHAPES[name], dtype)
            bound = sum(np.linalg.norm(part) for part in parts) + 1  # of the results
            assert (np.abs(result.astype(np.float64)) <= 2 * bound).all()


@every_strategy
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_and_the_smallest_numbers(strategy, dtype):
    """One rank's are encoded without overflow; its result is finite, and has the sign.

    Of QSGD not the largest: a norm may be out of range.
    """
    limits = np.finfo(dtype)
    large = limits.max / (100 if isinstance(strategy, QSGD) else 1)
    for value in (large, limits.tiny, limits.smallest_subnormal):
        array = np.array([value, -value] * 9, dtype)
        bucket = bucket_of(array)
        with np.errstate(all="ignore"):  # as the engine has it
            strategy.exchange(bucket, Loopback())
        assert np.isfinite(bucket.result).all()
        assert (bucket.result * np.sign(array) >= 0).all()
    if not isinstance(strategy, (TwoBit, MajorityVote, QSGD, TernGrad)):
        assert (np.abs(bucket.result) == limits.smallest_subnormal).all() or isinstance(
            strategy,
            Natural,  # to the least normal number, or 0
        )


@every_strategy
def test_what_overflows_in_a_sum_is_seen(strategy):
    """The result is not a finite number that has nothing to do with the sum."""
    if isinstance(strategy, (TwoBit, MajorityVote)):
        return  # they send no such numbers
    arrays = [{"a": np.full(8, 3e38, np.float32)}] * 4
    result = Ranks(4, strategy, Reduction(Sum)).step(arrays)["a"]
    # TernGrad and QSGD may round to 0.
    assert (~np.isfinite(result) | (result == 0)).all()
    assert not np.isfinite(result).all() or isinstance(strategy, (QSGD, TernGrad))


@every_random
def test_random_numbers_are_those_of_the_step_the_rank_the_names_and_the_seed(strategy):
    array = normal(200)
    first = coded(strategy, array)
    assert coded(strategy, array) == first
    assert coded(strategy, array, count=1) != first
    assert coded(strategy, array, rank=1) != first
    assert coded(strategy, array, name="b") != first
    reseeded = replace(strategy, seed=1)
    assert reseeded != strategy
    assert coded(reseeded, array) != first


@every_strategy
def test_pieces_are_coded_alike(strategy):
    """A tensor has more values than are coded at a time."""
    if strategy.stateful:
        return  # they have random numbers of their own
    values = normal(1024)
    found = Ranks(1, strategy).step([{"a": np.tile(values, 40)}])["a"].reshape(40, -1)
    alone = Ranks(1, strategy).step([{"a": values}])["a"]
    np.testing.assert_allclose(found, np.tile(alone, (40, 1)), 1e-6)


@every_random
def test_pieces_have_random_numbers_of_their_own(strategy):
    array = np.tile(normal(2**12), 16)
    message = np.frombuffer(coded(strategy, array), np.uint8)
    sixteenth = message.size // 16
    assert (message[-sixteenth:] != message[:sixteenth]).any()
    half = message.size // 2
    assert (message[-half:] != message[:half]).any()


@every_strategy
def test_the_bytes_do_not_depend_on_the_values(strategy):
    """Nor on state: a rank that has joined sends zeros of the same length."""
    for count in (0, 1, 9, 50):
        assert len(coded(strategy, np.zeros(count, np.float32))) == len(
            coded(strategy, normal(count), count=3)
        )


@pytest.mark.parametrize(
    ("strategy", "nbytes"),
    [
        (Float8(), 2**16 + 2**10),
        (Blockwise8(), 2**16 + 2**10),
        (Sign(), 2**13 + 4),
        (MajorityVote(), 2**14),
        (TwoBit(), 2**14),
        (QSGD(1), 2**14 + 2**9),
        (QSGD(4), 2**15 + 2**9),
        (QSGD(7), 2**15 + 2**9),
        (QSGD(8), 2**16 + 2**9),
        (TernGrad(), 2**14 + 4),
        (Natural(), 2**16 + 2),
    ],
    ids=repr,
)
def test_bytes_of_65536_values(strategy, nbytes):
    assert len(coded(strategy, normal(2**16))) == nbytes


def test_a_vote_is_no_sum():
    with pytest.raises(ValueError, match=r"does not compute hvd\.Sum; use one of hvd\.Average"):
        check_op(MajorityVote(), Sum)
