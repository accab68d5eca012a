"""Laws of every registered strategy: values, saved state, finite state, and temporary memory."""

from __future__ import annotations

import contextlib
import pickle
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

from hvdlite.compression import Bucket, Parameter, Reduction, StrategyState, exchange_bucket
from hvdlite.errors import GradientError
from hvdlite.transport.loopback import Loopback
from tests.compression.ranks import Ranks, gradients_of
from tests.compression.strategies import STRATEGIES

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
every_stateful = pytest.mark.parametrize(
    "strategy", [each for each in STRATEGIES if each.stateful], ids=repr
)


@every_strategy
def test_a_strategy_is_a_value(strategy):
    """Ranks compare names, and a rank that has joined gets a strategy as a pickle."""
    settings = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    same = type(strategy)(**settings)
    assert strategy == same
    assert hash(strategy) == hash(same)
    assert strategy.name == same.name == repr(strategy).removeprefix("Compression.")
    restored = pickle.loads(pickle.dumps(strategy))
    assert restored == strategy
    assert restored.is_identity == strategy.is_identity


@every_stateful
def test_steps_after_a_checkpoint_have_the_same_bits(strategy):
    shapes = {"a": (40, 30), "b": (7,), "c": ()}
    ranks, others = Ranks(2, strategy), Ranks(2, strategy)
    for step in range(4):
        gradients = gradients_of(2, shapes, step)
        found, expected = ranks.step(gradients), others.step(gradients)
        for name in shapes:
            assert found[name].tobytes() == expected[name].tobytes()
        for rank, state in enumerate(ranks.states):
            saved = state.state_dict()
            assert all(
                isinstance(each, np.ndarray) for entry in saved.values() for each in entry.values()
            )
            ranks.states[rank] = StrategyState()
            ranks.states[rank].load_state_dict(saved)


@every_stateful
@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_is_not_finite_is_not_remembered(strategy, bad, everywhere, caplog):
    """The step is refused, its result is not finite, or a warning tells of clipped values.

    The next steps are as ever.
    """
    ranks, shapes = Ranks(2, strategy), {"a": (40, 30), "b": (7,)}
    ranks.step(gradients_of(2, shapes))
    worse = gradients_of(2, shapes, 1)
    for values in worse[1].values():
        values.reshape(-1)[:: 1 if everywhere else values.size] = bad
    with contextlib.suppress(GradientError):
        found = ranks.step(worse)
        is_finite = all(np.isfinite(each).all() for each in found.values())
        assert bad == 3e38 or not is_finite or "have been clipped" in caplog.text
    for state in ranks.states:
        for name, entry in state.state_dict().items():
            for key, array in entry.items():
                assert np.isfinite(array).all(), (name, key)
    if bad != 3e38:
        for step in (2, 3):
            found = ranks.step(gradients_of(2, shapes, step))
            assert all(np.abs(each).max() < 1e3 for each in found.values())


@pytest.mark.slow
@every_strategy
def test_no_more_than_two_buckets(strategy):
    """A single rank adds up all of it; several ranks share that work."""
    parameters = [Parameter(name, (1024, 1024), np.dtype(np.float32)) for name in ("a", "b")]
    strategy = strategy.choose(parameters[0])
    bucket = Bucket(parameters, Reduction())
    np.random.default_rng(0).standard_normal(out=bucket.send, dtype=np.float32)
    exchange_bucket(strategy, bucket, Loopback())  # which allocates its state
    bucket.count += 1
    tracemalloc.start()
    try:
        exchange_bucket(strategy, bucket, Loopback())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * bucket.send.nbytes
