"""Strategies that build on others."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Adasum
from hvdlite.compression import (
    DENSE,
    ByParameter,
    Cast,
    Compression,
    DeepGradientCompression,
    ErrorFeedback,
    MajorityVote,
    Parameter,
    RandomK,
    Strategy,
    WarmUp,
)
from tests.compression.ranks import Ranks, gradients_of

FLOAT32 = np.dtype(np.float32)


def parameter(*shape, dtype=np.float32, name="a"):
    return Parameter(name, shape, np.dtype(dtype))


class Silent(Strategy):
    """A strategy that does not report what it has not sent."""

    def exchange(self, bucket, transport):
        raise NotImplementedError

    def __repr__(self):
        return "Silent()"


class TestErrorFeedback:
    def test_a_strategy_that_does_not_tell_is_refused(self):
        silent = [Silent(), WarmUp(Silent(), 3), ErrorFeedback(Compression.fp16), MajorityVote()]
        for inner in [*silent, RandomK(unbiased=True), DeepGradientCompression()]:
            with pytest.raises(ValueError, match="does not tell what it leaves out"):
                ErrorFeedback(inner)

    @pytest.mark.parametrize(("inner", "found"), [(Compression.TopK, "TopK"), ("fp16", "'fp16'")])
    def test_what_is_no_strategy_is_refused(self, inner, found):
        """For example a class whose settings were forgotten; its properties are true."""
        for wrap in (ErrorFeedback, lambda inner: WarmUp(inner, 3)):
            with pytest.raises(TypeError, match=f"{found} is no strategy; give one with its set"):
                wrap(inner)

    def test_the_residual_is_what_rounding_has_lost(self):
        """Two steps by hand: 1 + 2**-10 is 1 in bfloat16, and twice that is 1 + 2**-7."""
        ranks = Ranks(1, ErrorFeedback(Compression.bf16))
        value = {"a": np.array([1 + 2.0**-9], np.float32)}
        results = [float(ranks.step([value])["a"][0]) for _ in range(4)]
        assert results == [1.0, 1.0, 1 + 2.0**-7, 1.0]
        assert ranks.residual("a").tolist() == [0.0]

    @pytest.mark.parametrize("cast", [Compression.fp16, Compression.bf16, Cast("fp16", "auto")])
    def test_an_overflow_comes_once(self, cast):
        """As with a GradScaler, which skips that step, and continues with a smaller scale."""
        ranks = Ranks(2, ErrorFeedback(cast))
        ones = {"a": np.ones(4, np.float32)}
        bad = {"a": np.array([1, np.inf, -np.inf, np.nan], np.float32)}
        found = [ranks.step([ones, given])["a"].tolist() for given in (bad, ones, ones)]
        assert found[0][:3] == [1.0, np.inf, -np.inf]
        assert np.isnan(found[0][3])
        assert found[1:] == [[1.0] * 4] * 2

    def test_what_loses_nothing_needs_none(self):
        fed_back = ErrorFeedback(Compression.fp16)
        assert fed_back.choose(parameter(3, dtype=np.int64)) is DENSE
        assert fed_back.choose(parameter(3, dtype=np.float16)) is DENSE
        assert fed_back.choose(parameter(3)) is fed_back


class TestWarmUp:
    def test_the_first_steps_are_dense(self):
        ranks = Ranks(2, WarmUp(Compression.bf16, 2))
        for step in range(4):
            gradients = gradients_of(2, {"a": (50,)}, step)
            found = ranks.step(gradients)["a"]
            dense = (gradients[0]["a"] + gradients[1]["a"]) / 2
            assert (found == dense).all() == (step < 2)

    def test_around_what_is_chosen(self):
        assert WarmUp(Compression.fp16, 3).choose(parameter(2, dtype=np.int32)) is DENSE
        assert WarmUp(DENSE, 3).choose(parameter(2)) == WarmUp(DENSE, 3)

    def test_both_ways_to_combine(self):
        for strategy in (
            ErrorFeedback(WarmUp(Compression.bf16, 2)),
            WarmUp(ErrorFeedback(Compression.bf16), 2),
        ):
            ranks = Ranks(1, strategy)
            for step in range(4):
                ranks.step(gradients_of(1, {"a": (50,)}, step))
                assert bool(np.any(ranks.residual("a"))) == (step >= 2)


class TestByParameter:
    def rule(self, parameter):
        return Compression.none if len(parameter.shape) < 2 else Compression.bf16

    def test_each_its_own(self):
        chooser = ByParameter(self.rule, [Compression.none, Compression.bf16])
        assert chooser.choose(parameter(3)) is DENSE
        assert chooser.choose(parameter(3, 3)) is Compression.bf16
        assert chooser.choose(parameter(3, 3, dtype=np.int32)) is DENSE
        fed_back = ErrorFeedback(chooser)
        assert fed_back.choose(parameter(3)) is DENSE
        assert fed_back.choose(parameter(3, 3)) == ErrorFeedback(Compression.bf16)

    def test_what_it_can_do_is_what_all_can(self):
        chooser = ByParameter(self.rule, [Compression.none, Compression.bf16])
        assert Adasum in chooser.ops
        assert not chooser.stateful
        assert ByParameter(self.rule, [DENSE, WarmUp(Compression.fp16, 1)]).stateful
        with pytest.raises(ValueError, match="does not tell what it leaves out"):
            ErrorFeedback(ByParameter(self.rule, [DENSE, Silent()]))

    def test_a_rule_that_returns_something_else(self):
        chooser = ByParameter(self.rule, [Compression.none])
        with pytest.raises(ValueError, match=r"returns Compression\.bf16 for 'a', which is none"):
            chooser.choose(parameter(3, 3))
        with pytest.raises(ValueError, match="among is empty"):
            ByParameter(self.rule, [])
