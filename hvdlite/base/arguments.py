"""Checks of arguments; each raises a ValueError with the argument and its allowed values."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Require least <= value <= most, and an integer of Python's or numpy's types."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or int(value) < least
        or (most is not None and int(value) > most)
    ):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} is not an integer {bounds}")


def check_positive(name: str, value: Any) -> None:
    """Require 0 < value < infinity."""
    if not 0 < _number(value) < math.inf:
        raise ValueError(f"{name}={value!r} is not a number above 0")


def check_ratio(name: str, value: Any) -> None:
    """Require 0 < value <= 1."""
    if not 0 < _number(value) <= 1:
        raise ValueError(
            f"{name}={value!r} is not a number above 0 and at most 1; 0.01 is one percent"
        )


def check_momentum(name: str, value: Any) -> None:
    """Require 0 <= value < 1."""
    if not 0 <= _number(value) < 1:
        raise ValueError(f"{name}={value!r} is not a number from 0 to below 1")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Require one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def _number(value: Any) -> Any:
    """Return a number; NaN, which no range contains, for anything else."""
    return value if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def check_groups(num_groups: int, groups: int | list[Any] | None) -> None:
    """Check Horovod's two arguments to group gradients, which buckets make unnecessary."""
    check_count("num_groups", num_groups, 0)
    if isinstance(groups, Real):
        check_count("groups", groups, 0)
    if groups is not None and not isinstance(groups, (Real, list)):
        raise ValueError(f"groups={groups!r} is neither a number nor a list of lists of parameters")
