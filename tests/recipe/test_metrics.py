"""Weighted averages over ranks, and what is refused on all of them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.recipe import average_metrics
from tests.harness import ranks


@ranks(1, 2, 3, 4)
def test_closed_form():
    """Rank r reports r with weight r + 1: the average is 2 (n - 1) / 3."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        found = average_metrics({"loss": rank, "accuracy": 0.25}, weight=rank + 1)
        assert list(found) == ["loss", "accuracy"]
        assert found["loss"] == pytest.approx(2 * (size - 1) / 3, rel=1e-15)
        assert found["accuracy"] == 0.25
    plain = average_metrics({"loss": float(rank)})
    assert plain == {"loss": (size - 1) / 2}
    assert hvd.allgather_object(found) == [found] * size


@ranks(1, 2, 3)
def test_scalars_of_numpy():
    hvd.init()
    metrics = {
        "float32": np.float32(0.5),
        "int": np.int64(3),
        "array": np.array(1.5),
        "bfloat16": ml_dtypes.bfloat16(2.0),
        "bool": True,
    }
    expected = {"float32": 0.5, "int": 3.0, "array": 1.5, "bfloat16": 2.0, "bool": 1.0}
    found = average_metrics(metrics, weight=np.int64(7))
    assert found == expected
    assert all(type(value) is float for value in found.values())


@ranks(2, 3)
def test_weight_zero_does_not_count():
    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    metrics = {"b": math.nan, "a": math.inf} if last else {"a": 1.0, "b": 2.0}
    found = average_metrics(metrics, weight=0 if last else 5)
    assert found == {"a": 1.0, "b": 2.0}
    assert list(found) == list(metrics)


@ranks(2)
def test_nan_and_infinity_that_count_are_seen():
    hvd.init()
    sign = 1 - 2 * hvd.rank()
    found = average_metrics(
        {"nan": math.nan if hvd.rank() else 1.0, "inf": math.inf, "both": sign * math.inf}
    )
    assert found["inf"] == math.inf
    assert math.isnan(found["nan"])
    assert math.isnan(found["both"])


@ranks(1, 2)
def test_no_metrics():
    hvd.init()
    assert average_metrics({}) == {}


@ranks(1, 2, 3)
def test_all_weights_zero():
    hvd.init()
    with pytest.raises(ValueError, match=f"weights of all {hvd.size()} ranks are 0"):
        average_metrics({"loss": 1.0}, weight=0)
    assert average_metrics({"loss": 1.0}) == {"loss": 1.0}


@ranks(1, 2, 3)
@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "many", None])
def test_bad_weight_on_one_rank_is_an_error_on_all(weight):
    hvd.init()
    culprit = hvd.size() - 1
    with pytest.raises(ValueError, match=f"rank {culprit}: weight"):
        average_metrics({"loss": 1.0}, weight=weight if hvd.rank() == culprit else 1.0)
    assert average_metrics({"loss": 1.0}) == {"loss": 1.0}


@ranks(1, 3)
@pytest.mark.parametrize(
    "value", [None, "0.5", [1.0], np.zeros(1), np.zeros((2, 2)), 1j, np.complex64(1), 10**400]
)
def test_bad_value_on_one_rank_is_an_error_on_all(value):
    hvd.init()
    with pytest.raises(ValueError, match=r"rank 0: metric 'loss' is a .*expected a real scalar"):
        average_metrics({"loss": value if hvd.rank() == 0 else 1.0})
    assert average_metrics({"loss": 1.0}) == {"loss": 1.0}


@ranks(2, 3)
def test_different_names():
    hvd.init()
    metrics = {"loss": 1.0, "accuracy": 1.0} if hvd.rank() == 1 else {"loss": 1.0}
    others = [rank for rank in range(hvd.size()) if rank != 1]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        average_metrics(metrics)
    assert f"'accuracy' is missing on ranks {others}" in str(caught.value)
    assert "'loss' is missing" not in str(caught.value)
    assert average_metrics({"loss": 1.0}) == {"loss": 1.0}


@ranks(1, 2, 3)
def test_sums():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    found = hvd.sum_metrics({"count": rank, "tenths": 0.1, "big": 2**52})
    assert found == {"count": size * (size - 1) / 2, "tenths": 0.1 * size, "big": size * 2.0**52}
    assert list(found) == ["count", "tenths", "big"]
    with pytest.raises(ValueError, match=f"rank {size - 1}: metric 'x' is a str"):
        hvd.sum_metrics({"x": "1" if rank == size - 1 else 1})


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("samples", [2, 11])
def test_gathered_predictions(samples):
    """The median of all errors, which no average of medians gives, as numpy has it in float64."""
    hvd.init()
    draw = np.random.default_rng(samples)
    predictions, labels = draw.normal(size=(samples, 3)), draw.integers(0, 9, samples)
    for sharding in (
        hvd.Sharding(samples, 2, seed=3, allow_empty=True),  # in another order
        hvd.Sharding(samples, 5, shuffle=False, allow_empty=True),
    ):
        batches = sharding.indices(1)
        own = [predictions[indices] for indices in batches if len(indices)]
        found = hvd.gather((own, labels[np.concatenate(batches)]), batches)
        assert isinstance(found, tuple)
        np.testing.assert_array_equal(found[0], predictions)
        np.testing.assert_array_equal(found[1], labels)
        assert found[0].dtype == np.float64
        error = np.abs(found[0] - found[1][:, None])
        assert np.median(error) == np.median(np.abs(predictions - labels[:, None]))


@ranks(1, 3)
def test_gathered_rank_by_rank_and_repeated_places():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    counts = [number % 3 for number in range(size)]  # rank 0 has none
    found = hvd.gather([float(rank)] * counts[rank])
    assert found.tolist() == np.repeat(np.arange(size), counts).tolist()
    # Every rank repeats place 0, as the padding of a sampler does.
    found = hvd.gather(np.array([7, rank], np.int8), np.array([0, rank + 1]))
    assert found.tolist() == [7, *range(size)]
    assert found.dtype == np.int8
    assert hvd.gather([], []).shape == (0,)


@ranks(1, 2, 3)
def test_what_cannot_be_gathered():
    hvd.init()
    last = hvd.size() - 1
    is_last = hvd.rank() == last
    with pytest.raises(ValueError, match=rf"rank {last}: found \[2, 1\] rows"):
        hvd.gather([1, 2], [0] if is_last else [2 * hvd.rank(), 2 * hvd.rank() + 1])
    with pytest.raises(ValueError, match="an array whose first axis are samples"):
        hvd.gather(1.0)
    with pytest.raises(ValueError, match="expected integers"):
        hvd.gather([1.0], [0.5])
    if last:
        with pytest.raises(
            hvd.HorovodInternalError, match=rf"rank {last} has rows of float64\[\] with"
        ):
            hvd.gather(np.ones(1), [hvd.rank()] if is_last else None)
        with pytest.raises(hvd.HorovodInternalError, match=r"int64\[2\] without"):
            hvd.gather(np.ones((1, 2), np.int64 if is_last else np.int32))
    assert hvd.gather([hvd.rank()]).tolist() == list(range(last + 1))
