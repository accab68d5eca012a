"""Signs, votes and thresholds against references in float64."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Sum
from hvdlite.compression import ErrorFeedback, MajorityVote, Reduction, Sign, TwoBit
from tests.compression.ranks import SIZES, Ranks, gradients_of

SHAPES = {"a": (3, 7), "b": (), "c": (0, 2), "d": (50,), "e": (1,)}
DTYPES = [np.float16, np.float32, np.float64]


def signs(values):
    return np.where(values >= 0, 1.0, -1.0)


def mean_magnitude(values):
    return np.abs(values).sum() / values.size if values.size else 0.0


class TestSign:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_tensor_has_its_mean_magnitude(self, size, dtype):
        gradients = gradients_of(size, SHAPES, dtype=dtype)
        for name, found in Ranks(size, Sign()).step(gradients).items():
            own = [each[name].astype(np.float64) for each in gradients]
            expected = sum(mean_magnitude(each) * signs(each) for each in own) / size
            np.testing.assert_allclose(found, expected, 1e-3 if dtype == np.float16 else 1e-5)

    @pytest.mark.parametrize("size", SIZES)
    def test_or_the_bucket_has_one(self, size):
        gradients = gradients_of(size, SHAPES)
        means = [
            mean_magnitude(np.concatenate([part.ravel() for part in each.values()], dtype=float))
            for each in gradients
        ]
        for name, found in Ranks(size, Sign("bucket"), Reduction(Sum)).step(gradients).items():
            expected = sum(m * signs(each[name]) for m, each in zip(means, gradients, strict=True))
            np.testing.assert_allclose(found, expected, 1e-5, 1e-7)

    def test_zeros_count_as_positive(self):
        array = np.array([0.0, -0.0, -3.0, 1.0], np.float32)
        assert Ranks(1, Sign()).step([{"a": array}])["a"].tolist() == [1.0, 1.0, -1.0, 1.0]

    def test_the_mean_of_many_values_is_exact_to_the_type(self):
        array = np.random.default_rng(0).standard_normal(3 * 2**17 + 5).astype(np.float32)
        found = Ranks(1, Sign()).step([{"a": array}])["a"]
        np.testing.assert_allclose(np.abs(found), mean_magnitude(array.astype(np.float64)), 1e-6)

    def test_a_mean_whose_sum_is_out_of_range(self):
        array = np.full(100, 3e38, np.float32)
        np.testing.assert_allclose(Ranks(1, Sign()).step([{"a": array}])["a"], 3e38, 1e-6)
        array[::2] = -1e38
        found = Ranks(1, Sign()).step([{"a": array}])["a"]
        np.testing.assert_allclose(found, np.sign(array) * 2e38, 1e-6)

    def test_with_error_feedback_as_in_the_paper(self):
        """Karimireddy et al. 2019, algorithm 2, on one rank."""
        ranks, error = Ranks(1, ErrorFeedback(Sign())), np.zeros(31)
        for step in range(5):
            gradient = gradients_of(1, {"a": (31,)}, step)[0]["a"]
            corrected = gradient + error
            delta = mean_magnitude(corrected) * signs(corrected)
            error = corrected - delta
            found = ranks.step([{"a": gradient}])["a"]
            np.testing.assert_allclose(found, delta, 1e-5)
        np.testing.assert_allclose(ranks.residual("a"), error, atol=1e-6)


class TestMajorityVote:
    @pytest.mark.parametrize("size", [*SIZES, 5])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_sign_of_the_sum_of_signs(self, size, dtype):
        gradients = gradients_of(size, SHAPES, dtype=dtype)
        for each in gradients:
            each["d"][::3] = 0  # has no vote
        for name, found in Ranks(size, MajorityVote(0.25)).step(gradients).items():
            votes = sum(np.sign(each[name].astype(np.float64)) for each in gradients)
            np.testing.assert_array_equal(found, 0.25 * np.sign(votes))

    def test_magnitudes_do_not_count(self):
        arrays = [[1e9, -1e9, 1e-30], [-1e-9, 1e-9, 1e-30], [-1e-9, 1e-9, -1e30]]
        gradients = [{"a": np.array(each, np.float32)} for each in arrays]
        assert Ranks(3, MajorityVote()).step(gradients)["a"].tolist() == [-1.0, 1.0, 1.0]

    def test_a_tie_moves_nothing(self):
        """A tie is exactly 0, whatever the scale."""
        rows = np.array([[1, 1, -1], [1, -1, 1], [-1, 1, 1], [-1, -1, -1]], np.float32)
        for scale in (1.0, 0.1, 1e-40):
            found = Ranks(4, MajorityVote(scale)).step([{"a": row} for row in rows])["a"]
            assert found.tolist() == [0.0, 0.0, 0.0]

    def test_who_has_nothing_has_no_say(self):
        arrays = [np.array([-1.0, 2.0], np.float32), np.zeros(2, np.float32)]
        found = Ranks(2, MajorityVote()).step([{"a": array} for array in arrays])["a"]
        assert found.tolist() == [-1.0, 1.0]


class TestTwoBit:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_reaches_the_threshold_becomes_it(self, size, dtype):
        gradients = gradients_of(size, SHAPES, dtype=dtype)
        for name, found in Ranks(size, TwoBit(0.5)).step(gradients).items():
            own = [each[name].astype(np.float64) for each in gradients]
            expected = sum(0.5 * ((each >= 0.5) * 1.0 - (each <= -0.5)) for each in own) / size
            np.testing.assert_allclose(found, expected, 1e-3 if dtype == np.float16 else 1e-6)

    def test_thresholds_are_reached_by_equality(self):
        array = np.array([0.5, -0.5, 0.49999997, -0.49999997, 0.0, 9.0, -9.0], np.float32)
        found = Ranks(1, TwoBit(0.5)).step([{"a": array}])["a"]
        assert found.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.5, -0.5]

    def test_what_is_left_adds_up_until_it_is_sent(self):
        """As in MXNet: 0.2 reaches a threshold of 0.5 in the third step."""
        ranks = Ranks(1, ErrorFeedback(TwoBit(0.5)))
        gradient = {"a": np.full(3, 0.2, np.float32)}
        sent = [float(ranks.step([gradient])["a"][0]) for _ in range(6)]
        assert sent == [0.0, 0.0, 0.5, 0.0, 0.5, 0.0]
        np.testing.assert_allclose(ranks.residual("a"), 0.2, 1e-6)
