"""Scaling and warm-up against their closed forms."""

from __future__ import annotations

import doctest
import math

import pytest

import hvdlite as hvd
from hvdlite.recipe import learning_rate, scale_lr, warmup
from tests.harness import ranks


def test_example():
    assert doctest.testmod(learning_rate).failed == 0


@pytest.mark.parametrize("size", [1, 2, 3, 8, 256])
def test_scale(size):
    assert scale_lr(0.1, size=size) == 0.1 * size
    assert scale_lr(0.1, "linear", size) == 0.1 * size
    assert scale_lr(0.1, "sqrt", size) == 0.1 * math.sqrt(size)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 16.0), ("sqrt", 4.0)])
def test_warmup_is_a_straight_line_and_then_constant(rule, factor):
    schedule = warmup(0.5, 8, rule, size=16)
    for step in (0, 1, 2.5, 7.999):
        expected = 0.5 * (1 + (factor - 1) * step / 8)
        assert schedule(step) == pytest.approx(expected, rel=1e-15)
    assert schedule(0) == 0.5
    assert {schedule(step) for step in (8, 9, 8.5, 10_000)} == {0.5 * factor}


def test_one_rank_needs_no_warmup():
    schedule = warmup(0.3, 5, size=1)
    assert {schedule(step) for step in range(10)} == {0.3}


def test_no_steps_start_at_the_scaled_rate():
    assert warmup(0.1, 0, size=4)(0) == 0.4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rule": "cubic"}, "rule='cubic': expected one of 'linear', 'sqrt'"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": math.nan}, "lr=nan"),
        ({"size": 0}, "size=0"),
    ],
)
def test_bad_arguments(arguments, words):
    arguments = {"lr": 0.1, "size": 2, **arguments}
    with pytest.raises(ValueError, match=words):
        scale_lr(**arguments)
    with pytest.raises(ValueError, match=words):
        warmup(warmup_steps=5, **arguments)


@pytest.mark.parametrize("steps", [-1, math.inf, math.nan])
def test_bad_steps(steps):
    with pytest.raises(ValueError, match="warmup_steps="):
        warmup(0.1, steps, size=2)


@ranks(1, 3)
def test_the_size_is_the_worlds():
    hvd.init()
    assert scale_lr(0.1) == 0.1 * hvd.size()
    assert warmup(1.0, 10)(10) == hvd.size()
