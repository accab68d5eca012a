from __future__ import annotations

import numpy as np

from hvdlite.compression import Parameter, StrategyState
from hvdlite.compression.bucket import BucketState

FLOAT32 = np.dtype(np.float32)
A, B, C = (
    Parameter(name, shape, FLOAT32) for name, shape in (("a", (2, 3)), ("b", ()), ("c", (4,)))
)


def test_one_array_over_a_bucket():
    state = StrategyState()
    bucket = BucketState([A, B], state)
    residual = bucket.flat("residual", np.float32)
    assert residual.tolist() == [0.0] * 7
    residual[...] = np.arange(7)
    assert bucket.flat("residual", np.float32) is residual
    saved = state.state_dict()
    np.testing.assert_array_equal(saved["a"]["residual"], np.arange(6).reshape(2, 3))
    assert saved["b"]["residual"] == 6
    residual[...] = 0
    assert saved["b"]["residual"] == 6  # a copy


def test_loading_reaches_buckets_that_there_are():
    state = StrategyState()
    bucket = BucketState([A, C], state)
    bucket.flat("residual", np.float32)[...] = 5
    bucket.count = 3
    saved = state.state_dict()
    bucket.flat("residual", np.float32)[...] = 7
    bucket.count = 8
    state.load_state_dict(saved)
    assert bucket.flat("residual", np.float32).tolist() == [5.0] * 10
    assert bucket.count == 3
    state.load_state_dict({})
    assert bucket.flat("residual", np.float32).tolist() == [0.0] * 10
    assert bucket.count == 0


def test_counts_of_parameters_that_come_together_later():
    state = StrategyState()
    BucketState([A], state).count = 4
    joined = BucketState([A, B], state)
    assert joined.count == 4
    joined.count = 5
    assert BucketState([B], state).count == 5


def test_an_array_of_another_shape_is_not_taken_over():
    state = StrategyState()
    state.load_state_dict({"a": {"residual": np.ones(3)}})
    assert BucketState([A], state).flat("residual", np.float32).tolist() == [0.0] * 6


def test_an_exchange_makes_it_the_ranks_own():
    state = StrategyState()
    state.is_common = True
    bucket = BucketState([A], state)
    assert state.is_common
    bucket.count = 1
    assert not state.is_common
