"""The values that ``schedule=`` takes, and SINGA's modes, which are presets of them.

Ranks exchange gradients before a step or, if the step is *local*, weights after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from math import ceil
from typing import Any

from hvdlite.base.arguments import check_count, check_momentum, check_positive
from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import (
    Compression,
    ErrorFeedback,
    Parameter,
    Reduction,
    Strategy,
    Threshold,
    TopK,
)
from hvdlite.gradients.options import ExchangeSchedule, Preset


@dataclass(frozen=True, repr=False)
class EveryStep(ExchangeSchedule):
    """Exchange gradients before every step, as without a schedule."""


@dataclass(frozen=True)
class Accumulate(ExchangeSchedule):
    """Add up the gradients of several backward passes before an exchange and a step.

    Args:
        passes: number of passes; as ``backward_passes_per_step``.

    Raises:
        ValueError: it is not a whole number above 0.
    """

    passes: int

    def __post_init__(self) -> None:
        check_count("passes", self.passes)

    def check(
        self, strategy: Strategy, reduction: Reduction, passes: int, sparse_as_dense: bool
    ) -> tuple[None, int]:
        if passes != 1:
            raise ValueError(
                f"{self!r} and backward_passes_per_step={passes} mean the same; leave one of them "
                "out"
            )
        return None, self.passes

    def __repr__(self) -> str:
        return f"Schedule.Accumulate({self.passes})"


class LocalSchedule(ExchangeSchedule):
    """Base class of schedules of local steps, which are data classes."""

    #: Whether ranks exchange the change of the weights since the last exchange, not the weights.
    sends_changes: bool = False
    #: Whether the optimizer's state is averaged with the weights.
    momentum: bool = False

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer, which applies such changes."""
        return 1.0, 0.0

    @property
    def remembers(self) -> bool:
        """Return whether an exchange needs every rank, as each keeps state from the one before."""
        return False

    def is_local(self, steps: int) -> bool:
        """Return whether each rank makes the step after ``steps`` steps on its own gradients."""
        return True

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        """Return the indices of the parameters to exchange after ``steps`` steps."""
        raise NotImplementedError

    def check(
        self, strategy: Strategy, reduction: Reduction, passes: int, sparse_as_dense: bool
    ) -> tuple[ExchangeSchedule, int]:
        if reduction.op is not ReduceOp.AVERAGE:
            raise ValueError(
                f"{self!r} averages weights, which op=hvd.{reduction.op.name.capitalize()} does "
                "not; leave op or the schedule out"
            )
        if reduction.predivide != 1.0:
            raise ValueError(
                f"gradient_predivide_factor={reduction.predivide} is about gradients, and "
                f"{self!r} averages weights; leave one of them out"
            )
        if sparse_as_dense and self.is_local(0):
            raise ValueError(
                f"sparse_as_dense=True is about the exchange of gradients, and {self!r} exchanges "
                "none; leave it out"
            )
        if not self.sends_changes and not strategy.takes_weights:
            raise ValueError(
                f"{self!r} averages weights, and {strategy!r} is for gradients only: the values "
                "that it leaves out or rounds off would be missing from the weights; use "
                "hvd.Compression.none, .fp16 or .bf16, or hvd.Schedule.DiLoCo, which takes any"
            )
        return self, passes

    def __repr__(self) -> str:
        known: Any = fields(self) if is_dataclass(self) else ()  # a user's need not be one
        given = [(each, getattr(self, each.name)) for each in known]
        shown = [f"{each.name}={v}" for each, v in given if v or v != each.default]
        return f"Schedule.{type(self).__name__}({', '.join(shown)})"

    def gradient_path(self, owner: str) -> type:
        if owner == "torch":
            from hvdlite.torch.scheduled import Scheduled

            return Scheduled
        if owner == "tape":
            from hvdlite.tensorflow.local_steps import TapeSteps

            return TapeSteps
        from hvdlite.schedule.keras import KerasSteps

        return KerasSteps


@dataclass(frozen=True, repr=False)
class PartialSync(LocalSchedule):
    """Make every step local, and average one part of the weights after each, in rotation.

    This is SINGA's partial synchronisation. Whole parameters are assigned to parts of about equal
    size in bytes, the same on all ranks; after as many steps as there are parts, each part has
    been averaged once.

    Args:
        parts: number of parts, at most one for each parameter.
        bytes: approximate number of bytes to average after a step, instead of ``parts``.
        momentum: also average the optimizer's state arrays that have the shape of a parameter.

    Raises:
        ValueError: both or none of ``parts`` and ``bytes`` are given, or the value is not a whole
            number above 0.
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

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        sizes = tuple(parameter.nbytes for parameter in parameters)
        parts = partition(sizes, self.parts or ceil(sum(sizes) / (self.bytes or 1)))
        return parts[(steps - 1) % len(parts)] if parts else ()


@lru_cache(64)
def partition(sizes: tuple[int, ...], parts: int) -> tuple[tuple[int, ...], ...]:
    """Partition items into parts of about equal size: largest first, each to the smallest part.

    The largest part exceeds the smallest by the largest item at most (Graham 1969). No part is
    empty: if there are fewer items, there are fewer parts.

    Returns:
        For each part the positions of its items, ascending.
    """
    parts = min(max(parts, 1), len(sizes))
    members: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for position in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        # Among parts of equal size take the one with the fewest items: otherwise empty items pile
        # up in one part.
        part = min(range(parts), key=lambda each: (filled[each], len(members[each]), each))
        members[part].append(position)
        filled[part] += sizes[position]
    return tuple(tuple(sorted(part)) for part in members)


@dataclass(frozen=True, repr=False)
class LocalSGD(LocalSchedule):
    """Make every step local, and average the weights after every ``every`` steps.

    With ``start`` it is post-local SGD (Lin et al. 2018, arXiv:1808.07217): the first steps
    exchange gradients as usual.

    Args:
        every: steps from one average to the next.
        start: steps before the first local one. No `join` before that: ranks would differ in them.

    Raises:
        ValueError: ``every`` is not a whole number above 0, or ``start`` is negative.
    """

    every: int
    start: int = 0

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_count("start", self.start, 0)

    def is_local(self, steps: int) -> bool:
        return steps >= self.start

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        local = steps - self.start
        return range(len(parameters)) if local > 0 and local % self.every == 0 else ()


@dataclass(frozen=True, repr=False)
class DiLoCo(LocalSchedule):
    """Make every step local, and take an outer step after every ``every`` steps.

    This is Distributed Low-Communication training (Douillard et al. 2023, arXiv:2311.08105). The
    outer gradient is the weights at the last outer step minus a rank's weights now, averaged over
    the ranks. SGD with Nesterov momentum applies it to the weights of the last outer step, and all
    ranks continue from the result. Any ``compression`` can carry the outer gradient. The host
    holds a copy of the weights and the outer momentum.

    Args:
        every: steps from one outer step to the next.
        outer_lr: learning rate of the outer step.
        outer_momentum: momentum of the outer step, 0 <= outer_momentum < 1.

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
    def outer(self) -> tuple[float, float]:
        return self.outer_lr, self.outer_momentum

    @property
    def remembers(self) -> bool:  # anchors, or a momentum
        return self.every > 1 or self.outer_momentum > 0

    def due(self, steps: int, parameters: Sequence[Parameter]) -> Sequence[int]:
        return range(len(parameters)) if steps % self.every == 0 else ()


#: The schedule of a step by Adasum: reduce the change that the step makes, and apply it as it is.
EACH_CHANGE = DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)


class Schedule:
    """The schedules that ``schedule=`` takes, the same for every framework.

    An example: ``hvd.DistributedOptimizer(optimizer, schedule=hvd.Schedule.LocalSGD(every=8))``.
    """

    EveryStep = EveryStep
    Accumulate = Accumulate
    PartialSync = PartialSync
    LocalSGD = LocalSGD
    DiLoCo = DiLoCo


# The modes of Apache SINGA


def singa(dist_option: str = "fp32", spars: float = 0.05, corr: bool = True) -> Preset:
    """Return the preset for a mode of Apache SINGA's ``DistOpt``, for ``compression=``.

    The name alone, ``compression="sparseTopK"``, is the preset with the default values.

    Args:
        dist_option: ``"fp32"``: gradients unchanged; ``"fp16"``: gradients as 16-bit floats;
            ``"partialUpdate"``: local steps, with one part of the weights averaged after each;
            ``"sparseTopK"``: the largest gradients; ``"sparseThreshold"``: the gradients at or
            above a threshold.
        spars: for ``"sparseTopK"`` the fraction to send, for ``"sparseThreshold"`` the threshold.
        corr: whether the sparse modes add what they did not send to the next gradients.

    Raises:
        ValueError: there is no such name, or ``spars`` is out of range.
    """
    if dist_option in _SPARSE:
        strategy = _SPARSE[dist_option](spars)
        return Preset(ErrorFeedback(strategy) if corr else strategy)
    if dist_option in _OTHERS:
        return _OTHERS[dist_option]
    raise ValueError(
        f"{dist_option!r} is none of SINGA's names: {', '.join(NAMED)}; for others use "
        "hvd.Compression"
    )


_SPARSE: dict[str, Callable[[float], Strategy]] = {
    "sparseTopK": TopK,
    "sparseThreshold": Threshold,
}
_OTHERS = {
    "fp32": Preset(Compression.none),
    "fp16": Preset(Compression.fp16),
    # SINGA averages at most 2**21 elements of float32 after a step.
    "partialUpdate": Preset(Compression.none, PartialSync(bytes=2**23)),
}
#: What makes the preset of a mode with the default values.
NAMED = {mode: partial(singa, mode) for mode in (*_OTHERS, *_SPARSE)}
