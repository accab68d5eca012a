"""Arguments of any type are either accepted or refused with the expected values."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from hvdlite.base.arguments import (
    check_choice,
    check_count,
    check_momentum,
    check_positive,
    check_ratio,
)
from hvdlite.compression import Compression

NO_NUMBERS = [None, "1", "1%", True, False, math.nan, [1], 1j, np.ones(2), np.bool_(True)]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_count, [1, 2**70, np.int64(3), np.uint8(1)], [0, -1, 1.0, np.float32(2)]),
        (check_positive, [1, 1e-300, 2.5, np.float32(1), Fraction(1, 3)], [0, -0.0, -1, math.inf]),
        (check_ratio, [1, 1.0, 1e-9, np.float64(0.5)], [0, 1.0000001, 2, -0.5, math.inf]),
        (check_momentum, [0, 0.0, 0.999, np.float32(0.5)], [1, 1.0, -1e-9, -math.inf]),
    ],
)
def test_what_is_taken_and_what_is_refused(check, good, bad):
    for value in good:
        check("it", value)
    for value in [*bad, *NO_NUMBERS]:
        with pytest.raises(ValueError, match=f"^it={re.escape(repr(value))} is not (a|an) "):
            check("it", value)


def test_bounds_of_a_count():
    for value in (0, 5, 7):
        check_count("it", value, 0, 7)
    for value, least, most, expected in [
        (-1, 0, 7, "an integer from 0 to 7"),
        (8, 0, 7, "an integer from 0 to 7"),
        (2, 3, None, "an integer of 3 or more"),
    ]:
        with pytest.raises(ValueError, match=f"^it={value} is not {expected}$"):
            check_count("it", value, least, most)


def test_choices():
    check_choice("it", "b", "a", "b")
    for value in ("c", None, 1, b"a"):
        with pytest.raises(ValueError, match=f"^it={value!r} is not one of 'a', 'b'$"):
            check_choice("it", value, "a", "b")


SETTINGS = {
    "TopK": "ratio count per",
    "RandomK": "ratio seed",
    "Threshold": "value",
    "DeepGradientCompression": "ratio momentum clip_norm warm_up_steps warm_up_ratio",
    "PowerSGD": "rank min_compression seed",
    "QSGD": "levels block seed",
    "Float8": "block",
    "Blockwise8": "block",
    "Natural": "seed",
    "TernGrad": "clip per seed",
    "TwoBit": "threshold",
    "Sign": "per",
    "MajorityVote": "scale",
    "Cast": "kind",
    "WarmUp": "steps",
}
NEEDED = {"WarmUp": {"inner": Compression.none}}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_of_strategies(kind):
    for name, value in itertools.product(SETTINGS[kind].split(), ("1%", [1], -1, math.nan)):
        settings = {**NEEDED.get(kind, {}), name: value}
        with pytest.raises(
            ValueError, match=f"^{name}={re.escape(repr(value))} is not (a|an|one) "
        ):
            getattr(Compression, kind)(**settings)
