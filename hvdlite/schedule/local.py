"""Schedules in which ranks step by themselves, and exchange weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from hvdlite.arguments import check_count, check_momentum, check_positive
from hvdlite.compression import Parameter
from hvdlite.schedule.base import ExchangeSchedule


@dataclass(frozen=True, repr=False)
class PartialSync(ExchangeSchedule):
    """Every step is local, and after it one part of the weights is averaged, in turns.

    It is SINGA's partial synchronisation. Parameters are dealt into parts of about equal bytes,
    each as a whole, alike on all ranks; after as many steps as there are parts, each has been
    averaged once.

    Args:
        parts: how many; more than there are parameters count as so many.
        bytes: how much to average after a step, about, in the place of ``parts``.
        momentum: average the optimizer's state too, where it has the shape of a parameter.

    Raises:
        ValueError: both or none of ``parts`` and ``bytes`` are given, or not a whole number
            above 0.
    """

    parts: int | None = None
    bytes: int | None = None
    momentum: bool = False

    def __post_init__(self) -> None:
        if (self.parts is None) == (self.bytes is None):
            raise ValueError("PartialSync takes either parts=... or bytes=...; give one of them")
        if self.parts is not None:
            check_count("parts", self.parts)
        else:
            check_count("bytes", self.bytes)

    def is_local(self, steps: int) -> bool:
        """Always."""
        return True

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        """The parameters of the part whose turn it is."""
        parts = self._dealt(tuple(parameter.nbytes for parameter in parameters))
        return parts[(steps - 1) % len(parts)] if parts else ()

    def _dealt(self, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if self.bytes is None:
            return deal(sizes, self.parts or 1)
        return deal(sizes, ceil(sum(sizes) / self.bytes))

    def __repr__(self) -> str:
        size = f"parts={self.parts}" if self.bytes is None else f"bytes={self.bytes}"
        return f"Schedule.PartialSync({size}{', momentum=True' if self.momentum else ''})"


@lru_cache(64)
def deal(sizes: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], ...]:
    """Deal things into parts of about equal size: the largest first, each to the smallest part.

    The largest part exceeds the smallest by the largest thing at most (Graham 1969).

    Args:
        sizes: of the things.
        parts: how many; more than there are things count as so many.

    Returns:
        Positions in ``sizes``, ascending; no part is empty.
    """
    parts = min(max(parts, 1), len(sizes))
    members: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for position in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        # Of parts of one size the one with the fewest: else things without size pile up.
        part = min(range(parts), key=lambda each: (filled[each], len(members[each]), each))
        members[part].append(position)
        filled[part] += sizes[position]
    return tuple(tuple(sorted(part)) for part in members)


@dataclass(frozen=True, repr=False)
class LocalSGD(ExchangeSchedule):
    """Every step is local, and after every so many the weights are averaged.

    With ``start`` it is post-local SGD (Lin et al. 2018, arXiv:1808.07217): in the first steps
    gradients are exchanged as usual.

    Args:
        every: steps from one average to the next.
        start: steps before the first local one.

    Raises:
        ValueError: ``every`` is not a whole number above 0, or ``start`` is negative.
    """

    every: int
    start: int = 0

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_count("start", self.start, 0)

    def is_local(self, steps: int) -> bool:
        """From ``start`` on."""
        return steps >= self.start

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        """All, or none."""
        local = steps - self.start
        return range(len(parameters)) if local > 0 and local % self.every == 0 else ()

    def __repr__(self) -> str:
        start = f", start={self.start}" if self.start else ""
        return f"Schedule.LocalSGD(every={self.every}{start})"


@dataclass(frozen=True, repr=False)
class DiLoCo(ExchangeSchedule):
    """Every step is local, and after every so many their outcome is one outer step.

    It is Distributed Low-Communication training (Douillard et al. 2023, arXiv:2311.08105). The
    outer gradient is what the weights were at the last outer step less what a rank's are now,
    averaged over the ranks; SGD with Nesterov momentum applies it to those earlier weights, and
    all ranks go on from there. The outer gradient may travel by any ``compression``. On the
    host it takes memory for the earlier weights and the outer momentum.

    Args:
        every: steps from one outer step to the next.
        outer_lr: the learning rate of the outer step.
        outer_momentum: its momentum, from 0 to below 1.

    Raises:
        ValueError: an argument is out of range.
    """

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    sends_changes = True

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_positive("outer_lr", self.outer_lr)
        check_momentum("outer_momentum", self.outer_momentum)

    @property
    def outer(self) -> tuple[float, float]:  # type: ignore[override]
        """The learning rate and the momentum of the outer step."""
        return self.outer_lr, self.outer_momentum

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """Of the earlier weights and the momentum, which ranks must have alike."""
        return self.every > 1 or self.outer_momentum > 0

    def is_local(self, steps: int) -> bool:
        """Always."""
        return True

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        """All, or none."""
        return range(len(parameters)) if steps % self.every == 0 else ()

    def __repr__(self) -> str:
        outer = f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}"
        return f"Schedule.DiLoCo(every={self.every}, {outer})"


#: What a step by Adasum is: the change that it makes is reduced, and taken as it is.
EACH_CHANGE = DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
