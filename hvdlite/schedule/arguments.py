"""Check ``compression=`` and ``schedule=``, and combine them into presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite.base.reduction import ReduceOp
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
from hvdlite.schedule.schedules import Accumulate, EveryStep, ExchangeSchedule, PartialSync

# SINGA averages at most 2**21 elements of float32 after a step.
_PARTIAL_BYTES = 2**23


@dataclass(frozen=True)
class Preset:
    """A compression and a schedule as one value for ``compression=``.

    Attributes:
        compression: how gradients travel.
        schedule: when; None: in every step.
    """

    compression: Any
    schedule: ExchangeSchedule | None = None


#: A value for ``compression=``: one of ``hvd.Compression``, a class with ``compress`` and
#: ``decompress``, a preset, or the name of one.
CompressionArgument = Strategy | Preset | type[Any] | str


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
    """Check the arguments by which an optimizer or a tape is told what to exchange and when.

    Args:
        compression: a strategy, a user's class, a preset or the name of one.
        schedule: one of `Schedule`, or None.
        conversion: of the tensors that a user's class gets.
        reduction: sum, average or Adasum.
        passes: backward passes per step.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.

    Returns:
        The strategy; the schedule if it has local steps, else None; and the backward passes.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the arguments exclude each other, or there is no preset of this name.
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


def _named(compression: str) -> Preset:
    try:
        return singa(compression)
    except ValueError as error:
        raise ValueError(
            f"compression={compression!r} is no compression; use one of hvd.Compression, such as "
            f"hvd.Compression.fp16, or a name that hvd.singa takes ({error})"
        ) from None


def check_schedule(
    schedule: Any,
    strategy: Strategy,
    reduction: Reduction,
    passes: int = 1,
    sparse_as_dense: bool = False,
) -> tuple[ExchangeSchedule | None, int]:
    """Check a schedule against the other arguments of an optimizer.

    Args:
        schedule: the user's argument; None: every step.
        strategy: how gradients, or weights, travel.
        reduction: sum, average or Adasum.
        passes: backward passes per step.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.

    Returns:
        The schedule if it has local steps, else None; and the backward passes per step.

    Raises:
        TypeError: it is no schedule.
        ValueError: it excludes another argument.
    """
    if schedule is None or isinstance(schedule, EveryStep):
        return None, passes
    if isinstance(schedule, Accumulate):
        if passes != 1:
            raise ValueError(
                f"{schedule!r} and backward_passes_per_step={passes} mean the same; leave one of "
                "them out"
            )
        return None, schedule.passes
    if not isinstance(schedule, ExchangeSchedule):
        raise TypeError(
            f"schedule={schedule!r} is no schedule; use one of hvd.Schedule, such as "
            "hvd.Schedule.LocalSGD(every=8)"
        )
    _check_local(schedule, strategy, reduction, sparse_as_dense)
    return schedule, passes


def check_unweighted(batch_size: Any) -> None:
    """Raise if ``batch_size`` is given to an optimizer or tape with local steps, or with Adasum.

    Raises:
        ValueError: it is given.
    """
    if batch_size is not None:
        raise ValueError(
            "batch_size weights the gradients of all ranks, and with a schedule or hvd.Adasum each "
            "rank steps on its own; leave it out"
        )


def _check_local(
    schedule: ExchangeSchedule, strategy: Strategy, reduction: Reduction, sparse_as_dense: bool
) -> None:
    if reduction.op is not ReduceOp.AVERAGE:
        raise ValueError(
            f"{schedule!r} averages weights, which op=hvd.{reduction.op.name.capitalize()} does "
            "not; leave op or the schedule out"
        )
    if reduction.predivide != 1.0:
        raise ValueError(
            f"gradient_predivide_factor={reduction.predivide} is about gradients, and "
            f"{schedule!r} averages weights; leave one of them out"
        )
    if sparse_as_dense and schedule.is_local(0):
        raise ValueError(
            f"sparse_as_dense=True is about the exchange of gradients, and {schedule!r} exchanges "
            "none; leave it out"
        )
    if not schedule.sends_changes and not strategy.takes_weights:
        raise ValueError(
            f"{schedule!r} averages weights, and {strategy!r} is for gradients only: the values "
            "that it leaves out or rounds off would be missing from the weights; use "
            "hvd.Compression.none, .fp16 or .bf16, or hvd.Schedule.DiLoCo, which takes any"
        )
