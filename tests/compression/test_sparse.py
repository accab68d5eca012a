"""Strategies that send some entries; `test_deep_gradient.py` has the one with momentum."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import (
    Compression,
    DeepGradientCompression,
    ErrorFeedback,
    RandomK,
    Reduction,
    Threshold,
    TopK,
    sparse,
)
from hvdlite.errors import MismatchError
from hvdlite.transport.counting import CountingTransport
from tests.compression.ranks import SIZES, Ranks, gradients_of
from tests.compression.sparse_references import (
    DTYPES,
    SHAPES,
    check_result,
    joined,
    keep,
    largest,
)
from tests.harness import ranks
from tests.references import dtype_of


def drawn(strategy, size=200, step=0, name="a"):
    """Return the indices that `RandomK` draws, as the result shows them."""
    alone = Ranks(1, strategy)
    alone.states[0].load_state_dict({name: {"exchanges": np.array(step)}})
    return np.flatnonzero(alone.step([{name: np.arange(1.0, size + 1)}])[name])


def sent_of(strategy, own):
    """Return the part of a rank's gradients that it must send, in float64."""
    flat = joined(own)
    if isinstance(strategy, Threshold):
        return np.where(np.abs(flat) >= strategy.value, flat, 0)
    if isinstance(strategy, RandomK):
        ones = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        return np.where(joined(Ranks(1, strategy).step([ones])), flat, 0)
    parts = [flat] if strategy.per == "bucket" else [joined({"": each}) for each in own.values()]
    ratio = strategy.ratio
    counts = [strategy.count or sparse.part_of(part.size, ratio) for part in parts]
    pairs = zip(parts, counts, strict=True)
    return np.concatenate([keep(part, largest(part, count)) for part, count in pairs])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "strategy",
    [
        *(TopK(0.1), TopK(0.1, per="tensor"), TopK(count=5), TopK(count=5, per="tensor")),
        *(TopK(1.0), Threshold(0.5), Threshold(2), Threshold(1e9)),
        *(RandomK(0.05), RandomK(0.7), RandomK(1.0)),
    ],
    ids=str,
)
def test_the_reduction_of_what_is_sent(size, dtype, strategy):
    gradients = gradients_of(size, SHAPES, dtype=dtype_of(dtype))
    sent = [sent_of(strategy, own) for own in gradients]
    for op, divisor in ((Average, size), (Sum, 1)):
        found = Ranks(size, strategy, Reduction(op)).step(gradients)
        check_result(found, sent, divisor, dtype)


@pytest.mark.parametrize(("dtype", "entry"), [(np.float32, 8), (np.float64, 12)])
def test_bytes_of_top_k(dtype, entry):
    several = Ranks(3, TopK(0.01))
    sent = several.record("allgather")
    several.step([{"a": np.arange(-500, 501).astype(dtype)}] * 3)
    assert [[each.nbytes for each in own] for own in sent] == [[11 * entry]] * 3


def test_each_rank_sends_as_many_as_reach_the_threshold():
    several = Ranks(3, Threshold(1), Reduction(Sum))
    sent = several.record("allgather")
    rows = [[1, -1, 0.5, 0.99], [0] * 4, [-3, 0, 2, 7]]
    found = several.step([{"a": np.float32([*row, *[0] * 40])} for row in rows])
    assert [[each.nbytes for each in own] for own in sent] == [[2 * 8], [0], [3 * 8]]
    assert found["a"].tolist() == [-2, -1, 2, 7] + [0] * 40


def test_infinities_are_sent_and_leave_nothing_behind():
    both = Ranks(2, ErrorFeedback(TopK(count=2)), Reduction(Sum))
    rows = [[1, -np.inf, 2, np.inf], [1, np.inf, 3, 2]]
    found = both.step([{"a": np.float32(row)} for row in rows])["a"]
    np.testing.assert_array_equal(found, [0, np.nan, 3, np.inf])
    left = [state.state_dict()["a"]["residual"].tolist() for state in both.states]
    assert left == [[1, 0, 2, 0], [1, 0, 0, 2]]


def test_of_each_tensor_what_no_rank_has_is_not_sent():
    both = Ranks(2, TopK(0.1, per="tensor"))
    gradients = gradients_of(2, SHAPES)
    for own in gradients:
        own["c"][...] = 0
    sent = both.record("allgather")
    both.step(gradients, absent=["c"])
    others = sum(math.ceil(each.size / 10) for name, each in gradients[0].items() if name != "c")
    assert [[each.nbytes for each in own] for own in sent] == [[8 * others]] * 2


def test_settings():
    assert TopK() == TopK(0.01) == Compression.TopK(ratio=0.01)
    assert TopK().name == "TopK(ratio=0.01)"
    assert TopK(count=3).name == "TopK(count=3)"


@ranks(3)
def test_messages_of_different_lengths_between_processes():
    """Rank 0 has none to send; rank 1 has nearly all, which takes more than a chunk."""
    hvd.init()
    count = 300_000
    rows = [np.zeros(count), np.arange(count) - 7.0, np.arange(count) % 5.0]
    found = hvd.allreduce(
        rows[hvd.rank()].astype(np.float32), name="a", op=hvd.Sum, compression=Threshold(3)
    )
    expected = sum(np.where(np.abs(row) >= 3, row, 0) for row in rows)
    np.testing.assert_array_equal(found, expected)


def test_entries_depend_on_the_step_the_seed_and_the_names_alone():
    first = drawn(RandomK(0.1)).tolist()
    assert first == drawn(RandomK(0.1)).tolist()
    for other in ({"step": 1}, {"strategy": RandomK(0.1, seed=1)}, {"name": "b"}):
        assert first != drawn(**{"strategy": RandomK(0.1), **other}).tolist()


@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.8])
def test_all_entries_are_drawn_alike(ratio):
    """The number of times that an entry is drawn has a binomial distribution."""
    steps, size = 400, 60
    times = np.zeros(size)
    pairs = np.zeros((size, size))
    for step in range(steps):
        chosen = drawn(RandomK(ratio), size, step, "d")
        assert chosen.size == round(ratio * size)
        times[chosen] += 1
        pairs[np.ix_(chosen, chosen)] += 1
    spread = np.sqrt(steps * ratio * (1 - ratio))
    assert np.abs(times - steps * ratio).max() < 4.5 * spread
    # Neighbours are drawn independently.
    together = ratio * (size * ratio - 1) / (size - 1)
    apart = np.sqrt(steps * together * (1 - together))
    assert np.abs(np.diag(pairs, 1) - steps * together).max() < 4.5 * apart


@pytest.mark.parametrize("op", [Average, Sum], ids=lambda op: op.name)
def test_unbiased(op):
    """11 of 41 entries are sent, times 41/11, since each is drawn in 11 of 41 steps."""
    rows = [np.arange(1.0, 42.0), -(np.arange(3.0, 44.0) ** 2)]
    both = Ranks(2, Compression.RandomK(0.25, unbiased=True), Reduction(op))
    found = both.step([{"a": row} for row in rows])["a"]
    chosen = np.flatnonzero(found)
    assert chosen.size == 11
    expected = sum(rows)[chosen] * 41 / 11 / (2 if op is Average else 1)
    np.testing.assert_allclose(found[chosen], expected, 1e-12)


def test_a_rank_without_state_draws_with_the_others():
    both = Ranks(2, RandomK(0.1))
    both.states[0].load_state_dict({"a": {"exchanges": np.array(7)}})  # the other one has joined
    found = both.step([{"a": np.arange(1.0, 201.0)}, {"a": np.zeros(200)}])["a"]
    np.testing.assert_array_equal(np.flatnonzero(found), drawn(RandomK(0.1), step=7))


def test_different_entries_on_another_rank_are_detected(monkeypatch):
    draw = sparse._draw

    def differs(*given):
        return draw(*given) + (threading.current_thread().name == "rank 1")

    monkeypatch.setattr(sparse, "_draw", differs)
    messages = Ranks(3, RandomK(0.1)).refusals([{"first": np.ones(200)}] * 3, MismatchError)
    for rank, message in enumerate(messages):
        assert message.startswith(
            f"rank {rank}: for the bucket of 'first', RandomK has drawn other entries on rank 1 "
            "than on rank 0"
        )


def test_no_index_travels():
    both = Ranks(2, RandomK(0.01))
    gathered, reduced = both.record("allgather"), both.record("allreduce")
    both.step([{"a": np.ones(1000)}] * 2)
    assert [[each.nbytes for each in own] for own in gathered] == [[40]] * 2  # slices of those
    assert [[each.nbytes for each in own] for own in reduced] == [[80]] * 2


@pytest.mark.parametrize(
    ("ratio", "size", "count"),
    [
        (0.01, 100, 1),  # 0.01 * 100 is 1.0, but 0.07 * 100 is 7.000000000000001
        (0.07, 100, 7),
        (0.01, 101, 2),
        (0.29, 100, 29),  # 28.999999999999996
        (0.001, 1, 1),
        (1e-9, 3, 1),
        (0.5, 0, 0),
        (1.0, 7, 7),
        (1, 7, 7),
        (np.float64(0.07), 100, 7),
    ],
)
def test_a_ratio_is_rounded_up_as_it_is_written(ratio, size, count):
    assert sparse.part_of(size, ratio) == count


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", [Threshold(1e-3), TopK(0.9), DeepGradientCompression(0.9)])
def test_nearly_everything_takes_no_more_than_a_dense_exchange(strategy, size):
    ranks = Ranks(size, ErrorFeedback(strategy) if strategy.tells_unsent else strategy)
    counting = [CountingTransport(each) for each in ranks.simulation.transports]
    ranks.simulation.transports[:] = counting
    shapes = {"a": (300,), "b": (7, 100)}
    gradients = gradients_of(size, shapes)
    results = ranks.step(gradients)
    dense = 2 * (size - 1) / size * 4 * 1000
    assert all(each.sent <= dense + 100 for each in counting)
    key = "residual" if strategy.tells_unsent else "accumulated"
    for name in shapes:
        total = sum(each[name].astype(np.float64) for each in gradients)
        left = ranks.residual(name, key)
        np.testing.assert_allclose(results[name] * size + left, total, atol=1e-5)
        assert results[name].any()
