"""Conservation: results and what is left add up to all gradients, where a strategy remembers it."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import DeepGradientCompression, Reduction, StrategyState
from tests.compression.ranks import SIZES, Ranks, gradients_of
from tests.compression.strategies import WITH_FEEDBACK

SHAPES = {"a": (7, 9), "b": (), "c": (130,), "d": (0, 3), "e": (5, 5, 5)}
STEPS = 6


@pytest.mark.parametrize(
    "strategy", [*WITH_FEEDBACK, DeepGradientCompression(0.05, momentum=0.0)], ids=repr
)
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_lost(strategy, size):
    """It holds over several steps, a checkpoint, and buckets that are packed anew."""
    check(strategy, size, Average, size)
    check(strategy, size, Sum, 1)


def check(strategy, size, op, divisor):
    ranks = Ranks(size, strategy, Reduction(op))
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    applied = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    # Residuals are rounded to the dtype of the gradients.
    largest = dict.fromkeys(SHAPES, 1e-30)
    for step in range(STEPS):
        gradients = gradients_of(size, SHAPES, step)
        if step == 2:
            _save_and_load(ranks)
        names = [[*SHAPES]] if step < 4 else [["e", "a"], ["d", "c", "b"]]
        for members in names:
            own = [{name: each[name] for name in members} for each in gradients]
            for name, result in ranks.step(own).items():
                applied[name] += result
                largest[name] = max(largest[name], np.abs(result).max(initial=0))
                given[name] += sum(each[name].astype(np.float64) for each in own) / divisor
    for name, total in given.items():
        key = "residual" if strategy in WITH_FEEDBACK else "accumulated"
        left = ranks.residual(name, key) / divisor
        scale = max(np.abs(total).max(initial=0), np.abs(left).max(initial=0), largest[name])
        np.testing.assert_allclose((applied[name] + left) / scale, total / scale, atol=3e-6)


def _save_and_load(ranks):
    for rank, state in enumerate(ranks.states):
        saved = state.state_dict()
        ranks.states[rank] = StrategyState()
        ranks.states[rank].load_state_dict(saved)
