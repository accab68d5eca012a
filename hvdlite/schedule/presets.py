"""A compression and a schedule under one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite.compression import (
    Compression,
    Conversion,
    ErrorFeedback,
    Reduction,
    Strategy,
    Threshold,
    TopK,
    check_op,
    check_strategy,
)
from hvdlite.schedule.base import ExchangeSchedule
from hvdlite.schedule.local import PartialSync
from hvdlite.schedule.namespace import check_schedule

# What SINGA averages after a step at most: 2**21 elements of float32.
_PARTIAL_BYTES = 2**23


@dataclass(frozen=True)
class Preset:
    """What ``compression=`` takes for both arguments.

    Attributes:
        compression: how gradients travel.
        schedule: when; None: in every step.
    """

    compression: Any
    schedule: ExchangeSchedule | None = None


#: What says how gradients travel: one of ``hvd.Compression``, a class with ``compress`` and
#: ``decompress``, a preset, or the name of one.
CompressionArgument = Strategy | Preset | type[Any] | str


def singa(dist_option: str = "fp32", spars: float = 0.05, corr: bool = True) -> Preset:
    """Return what Apache SINGA's ``DistOpt`` does under a name, for ``compression=``.

    The name alone, ``compression="sparseTopK"``, stands for it with the default values.

    Args:
        dist_option: ``"fp32"``: gradients as they are; ``"fp16"``: as 16-bit floats;
            ``"partialUpdate"``: ranks step by themselves, and average one part of the weights
            after each step; ``"sparseTopK"``: the greatest gradients; ``"sparseThreshold"``: those
            of a threshold or more.
        spars: for ``"sparseTopK"`` the part of all that is sent, for ``"sparseThreshold"`` the
            threshold.
        corr: whether what the sparse ones do not send is added to the next gradients.

    Raises:
        ValueError: there is no such name, or ``spars`` is out of range.
    """
    presets = {
        "fp32": lambda: Preset(Compression.none),
        "fp16": lambda: Preset(Compression.fp16),
        "partialUpdate": lambda: Preset(Compression.none, PartialSync(bytes=_PARTIAL_BYTES)),
        "sparseTopK": lambda: Preset(_corrected(TopK(spars), corr)),
        "sparseThreshold": lambda: Preset(_corrected(Threshold(spars), corr)),
    }
    if dist_option not in presets:
        raise ValueError(
            f"{dist_option!r} is none of SINGA's names: {', '.join(presets)}; for others use "
            "hvd.Compression"
        )
    return presets[dist_option]()


def _named(compression: str) -> Preset:
    try:
        return singa(compression)
    except ValueError as error:
        raise ValueError(
            f"compression={compression!r} is no compression; use one of hvd.Compression, such as "
            f"hvd.Compression.fp16, or a name that hvd.singa takes ({error})"
        ) from None


def _corrected(strategy: Strategy, corr: bool) -> Strategy:
    return ErrorFeedback(strategy) if corr else strategy


def check_exchange(
    compression: CompressionArgument,
    schedule: Any,
    conversion: Conversion,
    reduction: Reduction,
    passes: int = 1,
    sparse_as_dense: bool = False,
) -> tuple[Strategy, ExchangeSchedule | None, int]:
    """Check how and when an optimizer or a tape is to exchange what.

    Args:
        compression: a strategy, a class of the user's own, a preset or the name of one.
        schedule: one of `Schedule`, or None.
        conversion: of the tensors that a class of the user's own gets.
        reduction: sum, average or Adasum.
        passes: backward passes of a step.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.

    Returns:
        The strategy; the schedule if it has local steps, else None; and the backward passes.

    Raises:
        TypeError: one is something else.
        ValueError: they do not go together, or there is no preset of this name.
    """
    preset = _named(compression) if isinstance(compression, str) else compression
    if isinstance(preset, Preset):
        if preset.schedule is not None and schedule is not None:
            raise ValueError(
                f"compression={compression!r} has the schedule {preset.schedule!r}; leave out "
                f"schedule={schedule!r}"
            )
        preset, schedule = preset.compression, preset.schedule or schedule
    strategy = check_strategy(preset, conversion)
    check_op(strategy, reduction.op)
    chosen, passes = check_schedule(schedule, strategy, reduction, passes, sparse_as_dense)
    return strategy, chosen, passes
