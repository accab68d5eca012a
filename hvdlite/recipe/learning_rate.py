"""The learning rate for N times the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from hvdlite.world import parts

_RULES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}


def scale_lr(lr: float, rule: str = "linear", size: int | None = None) -> float:
    """Scale the learning rate of one process to the global batch of all ranks.

    The linear rule (Goyal et al. 2017, arXiv:1706.02677) fits SGD, the square-root rule
    (Krizhevsky 2014, arXiv:1404.5997) is often used for adaptive optimizers.

    Args:
        lr: The rate for one process, finite and not negative.
        rule: ``"linear"`` (times size) or ``"sqrt"`` (times the square root of size).
        size: The number of ranks; None: that of the world, or of virtual ranks if there are any.

    Raises:
        ValueError: Unknown rule, or a rate or size that is out of range.
    """
    if rule not in _RULES:
        raise ValueError(f"rule={rule!r}: expected one of {', '.join(map(repr, _RULES))}")
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr!r}: expected a finite number that is not negative")
    ranks = parts.current.size if size is None else size
    if ranks < 1:
        raise ValueError(f"size={ranks!r}: expected at least one rank")
    return lr * _RULES[rule](ranks)


def warmup(
    lr: float, warmup_steps: float, rule: str = "linear", size: int | None = None
) -> Callable[[float], float]:
    """Return a schedule that rises linearly from ``lr`` to the scaled rate and stays there.

    This is the gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2).
    With ``lr=1.0`` it gives the multipliers that torch's ``LambdaLR`` expects.

    Args:
        lr, rule, size: As for `scale_lr`.
        warmup_steps: Length of the warm-up, in the unit of the schedule's argument: steps, or
            epochs (fractions allowed). 0: no warm-up.

    Raises:
        ValueError: ``warmup_steps`` is negative or not finite, or as for `scale_lr`.

    Example:
        >>> schedule = warmup(0.1, warmup_steps=10, size=3)
        >>> [round(schedule(step), 3) for step in (0, 5, 10, 20)]
        [0.1, 0.2, 0.3, 0.3]
    """
    target = scale_lr(lr, rule, size)
    if not (math.isfinite(warmup_steps) and warmup_steps >= 0):
        raise ValueError(
            f"warmup_steps={warmup_steps!r}: expected a finite number that is not negative"
        )

    # A function, because torch's LambdaLR would save a callable object in its state dict, and
    # a resume on another number of ranks would restore the old target.
    def schedule(step: float) -> float:
        if step >= warmup_steps:
            return target
        return lr + (target - lr) * max(step, 0) / warmup_steps

    return schedule
