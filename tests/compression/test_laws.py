"""Laws of every registered strategy: values, saved state, finite state, and temporary memory."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

from hvdlite.base.reduction import Adasum
from hvdlite.compression import (
    DENSE,
    Bucket,
    ByParameter,
    Compression,
    Parameter,
    Reduction,
    StrategyState,
    exchange_bucket,
)
from hvdlite.compression.sparse import Sparse
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


@every_strategy
def test_integers_travel_as_they_are_and_adasum_is_for_what_is_linear(strategy):
    chosen = strategy.choose(Parameter("steps", (3,), np.dtype(np.int64)))
    assert getattr(chosen, "inner", chosen) is DENSE  # also of ErrorFeedback(Compression.none)
    combines = strategy in (Compression.none, Compression.fp16, Compression.bf16)
    assert (Adasum in strategy.ops) == (combines or isinstance(strategy, ByParameter))


@every_strategy
@pytest.mark.parametrize("size", [1, 3])
def test_no_elements_and_zeros(strategy, size):
    given = {"a": np.zeros((0, 3)), "b": np.zeros(37), "c": np.full((20, 30), -0.0)}
    for name, result in Ranks(size, strategy).step([given] * size).items():
        assert result.shape == given[name].shape
        assert not result.any()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Cast", {"kind": "fp8"}, "kind='fp8' is not one of 'fp16', 'bf16'"),
        ("Cast", {"kind": "fp16", "scale": -1.0}, "scale=-1.0 is neither a number from"),
        ("Cast", {"kind": "fp16", "scale": "much"}, "scale='much' is neither a number from"),
        ("Float8", {"block": 2**16 + 1}, "block=65537 is not an integer from 1 to 65536"),
        ("Blockwise8", {"block": 0}, "block=0 is not an integer from 1"),
        ("QSGD", {"levels": 128}, "levels=128 is not an integer from 1 to 127"),
        ("QSGD", {"block": 0}, "block=0 is not an integer from 1"),
        ("QSGD", {"seed": -1}, "seed=-1 is not an integer of 0 or more"),
        ("Natural", {"seed": None}, "seed=None is not an integer"),
        ("Sign", {"per": "layer"}, "per='layer' is not one of 'tensor', 'bucket'"),
        ("TernGrad", {"per": "all"}, "per='all' is not one of 'tensor', 'bucket'"),
        ("TernGrad", {"clip": 0}, "clip=0 is not a number above 0"),
        ("TernGrad", {"seed": 0.5}, "seed=0.5 is not an integer"),
        ("TwoBit", {"threshold": 0}, "threshold=0 is not a number above 0"),
        ("MajorityVote", {"scale": -1.0}, "scale=-1.0 is not a number above 0"),
        ("TopK", {"ratio": 1.5}, "ratio=1.5 is not a number above 0 and at most 1"),
        ("TopK", {"count": 0}, "count=0 is not an integer of 1 or more"),
        ("TopK", {"ratio": 0.1, "count": 3}, "give one of them"),
        ("TopK", {"per": "layer"}, "per='layer' is not one of 'bucket', 'tensor'"),
        ("Threshold", {"value": 0}, "value=0 is not a number above 0"),
        ("RandomK", {"ratio": 0}, "ratio=0 is not"),
        ("RandomK", {"seed": -1}, "seed=-1 is not"),
        ("DeepGradientCompression", {"ratio": 0}, "ratio=0 is not"),
        ("DeepGradientCompression", {"warm_up_ratio": 0}, "warm_up_ratio=0 is not"),
        ("DeepGradientCompression", {"momentum": 1}, "momentum=1 is not"),
        ("DeepGradientCompression", {"clip_norm": 0}, "clip_norm=0 is not a number above 0"),
        ("DeepGradientCompression", {"warm_up_steps": -1}, "warm_up_steps=-1 is not an integer"),
        (
            "DeepGradientCompression",
            {"ratio": 0.5, "warm_up_steps": 1},
            "warm_up_ratio=0.25 is below ratio=0.5",
        ),
        ("PowerSGD", {"rank": 0}, "rank=0 is not an integer of 1 or more"),
        ("PowerSGD", {"min_compression": 0}, "min_compression=0 is not a number above 0"),
        ("PowerSGD", {"seed": -1}, "seed=-1 is not an integer of 0 or more"),
        ("WarmUp", {"inner": DENSE, "steps": 2.5}, "steps=2.5 is not an integer of 0 or more"),
    ],
    ids=str,
)
def test_settings_out_of_range(name, settings, message):
    """One value of each: `tests/base/test_arguments.py` has all that is out of a range."""
    with pytest.raises(ValueError, match=message):
        getattr(Compression, name)(**settings)


def states_of(ranks):
    """Return all that strategies remember: arrays by rank, parameter and key."""
    return {
        (rank, name, key): array
        for rank, state in enumerate(ranks.states)
        for name, entry in state.state_dict().items()
        for key, array in entry.items()
    }


def check_unchanged(ranks, before):
    after = states_of(ranks)
    assert after.keys() == before.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], array, str(key))


@every_stateful
def test_what_no_rank_has_a_gradient_of_stays_as_it_is(strategy):
    ranks, shapes = Ranks(2, strategy), {"a": (40, 30), "c": (20, 30)}
    for step in range(3):
        ranks.step(gradients_of(2, shapes, step))
    before, gradients = states_of(ranks), gradients_of(2, shapes, 3)
    for own in gradients:
        own["c"][...] = 0
    ranks.step(gradients, absent=["c"])
    for key, array in states_of(ranks).items():
        if key[1:] != ("c", "exchanges") and key[1] == "c":
            np.testing.assert_array_equal(array, before[key])


def sends(strategy, bad):
    """Return whether a value that is not finite is sent, and not refused."""
    while hasattr(strategy, "inner"):
        strategy = strategy.inner
    return strategy.takes_weights or (isinstance(strategy, Sparse) and np.isinf(bad))


@every_strategy
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_cannot_be_sent_is_refused_by_name_on_all_ranks(strategy, size, bad):
    """A value that is sent is in the result (`test_what_is_not_finite_is_not_remembered`)."""
    ranks, shapes = Ranks(size, strategy), {"a": (40, 30), "layer.weight": (20, 30)}
    for step in range(2):
        ranks.step(gradients_of(size, shapes, step))
    before, worse = states_of(ranks), gradients_of(size, shapes, 2)
    worse[-1]["layer.weight"][1, 2] = bad
    if sends(strategy, bad):
        return
    where = f"on rank {size - 1}, and the compression cannot send that; lower the learning rate"
    for rank, message in enumerate(ranks.refusals(worse)):
        assert message.startswith(
            f"rank {rank}: the gradient of 'layer.weight' is not finite {where}"
        )
    # All ranks have come equally far, with their state unchanged.
    assert len({*map(tuple, ranks.simulation.calls)}) == 1
    check_unchanged(ranks, before)
    ranks.step(gradients_of(size, shapes, 2))


@every_stateful
def test_nothing_changes_wherever_communication_fails(strategy):
    ranks, shapes = Ranks(2, strategy), {"a": (40, 30)}
    for step in range(3):
        ranks.step(gradients_of(2, shapes, step))
    before, meet = states_of(ranks), ranks.simulation.meet
    for fails_at in itertools.count():
        left = [fails_at] * 2

        def fail(rank, *given, left=left):
            if not left[rank]:
                raise ConnectionError("gone")
            left[rank] -= 1
            return meet(rank, *given)

        ranks.simulation.meet = fail
        with contextlib.suppress(ConnectionError):
            ranks.step(gradients_of(2, shapes, 3))
            break
        check_unchanged(ranks, before)
    assert fails_at


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
    parameters = [Parameter(name, (512, 1024), np.dtype(np.float32)) for name in ("a", "b")]
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
