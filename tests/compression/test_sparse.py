"""Common properties of sparse strategies."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.compression import (
    DeepGradientCompression,
    ErrorFeedback,
    Threshold,
    TopK,
)
from hvdlite.compression.sparse import part_of
from hvdlite.transport.counting import CountingTransport
from tests.compression.ranks import Ranks, gradients_of


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
    assert part_of(size, ratio) == count


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
