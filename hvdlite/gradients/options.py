"""Options of an optimizer's or a tape's exchange: its arguments, checked and combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import Conversion, Reduction, Strategy, check_op, check_strategy
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.world import parts


class ExchangeSchedule:
    """Base class of schedules: values whose settings are compared across ranks.

    This one exchanges gradients in every step. The others are in `hvdlite.schedule`.
    """

    def check(
        self, strategy: Strategy, reduction: Reduction, passes: int, sparse_as_dense: bool
    ) -> tuple[ExchangeSchedule | None, int]:
        """Check a schedule against the other arguments of an optimizer.

        Returns:
            The schedule if it has gradient paths of its own, else None; and the backward passes.
        """
        return None, passes

    def gradient_path(self, owner: str) -> Any:
        """Return the class that makes the steps of this schedule; see `gradient_path`."""
        return None

    def __repr__(self) -> str:
        return f"Schedule.{type(self).__name__}()"


@dataclass(frozen=True)
class Preset:
    """A compression and a schedule as one value for ``compression=``.

    Attributes:
        schedule: when; None: in every step.
    """

    compression: Any
    schedule: ExchangeSchedule | None = None


#: A value for ``compression=``: one of ``hvd.Compression``, a class with ``compress`` and
#: ``decompress``, a preset, or the name of one.
CompressionArgument = Strategy | Preset | type[Any] | str

#: Returns what makes a preset, by its name; `hvdlite.assembly` sets it.
presets: Callable[[], Mapping[str, Callable[[], Preset]]] = dict
#: Returns the schedule of steps by Adasum, for PyTorch's optimizer; `hvdlite.assembly` sets it.
adasum: Callable[[], ExchangeSchedule | None] = lambda: None  # noqa: E731


@dataclass(frozen=True)
class Options:
    """The settings of an optimizer's exchange.

    Attributes:
        strategy: how gradients travel.
        reduction: sum, average or Adasum.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.
        passes: backward passes whose gradients add up before an exchange.
        schedule: has gradient paths of its own; None: gradients are exchanged in every step.
        model: whose buffers virtual ranks average; None: none are.
        average_passes: whether the gradients of several passes are averaged, and not summed.
        scale_local: whether gradients that are not exchanged are divided by the number of ranks.
    """

    strategy: Strategy
    reduction: Reduction
    sparse_as_dense: bool
    passes: int = 1
    process_set: ProcessSet = global_process_set
    schedule: ExchangeSchedule | None = None
    model: Any = None
    average_passes: bool = False
    scale_local: bool = True

    @property
    def replicates(self) -> bool:
        """Return whether weights must be the same on all ranks."""
        return self.schedule is None and self.reduction.op is not ReduceOp.ADASUM


def gradient_path(owner: str, schedule: ExchangeSchedule | None) -> Any:
    """Return the class that makes steps otherwise than by one exchange of gradients for each.

    Args:
        owner: ``"torch"``: of an optimizer, a class derived from `Distributed` of its adapter;
            ``"keras.tensorflow"``, ``"keras.torch"``: of an optimizer of Keras, a `GradientPath`;
            ``"tape"``: of a tape.
        schedule: from `make_options`.

    Returns:
        The class for virtual ranks, else the one for the schedule; None: there are neither.
    """
    path = parts.current.gradient_path(owner)
    return schedule.gradient_path(owner) if path is None and schedule is not None else path


def make_options(
    compression: CompressionArgument,
    schedule: Any,
    conversion: Conversion,
    reduction: Reduction,
    passes: int = 1,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    model: Any = None,
    **more: bool,
) -> Options:
    """Check the arguments that say what an optimizer or a tape exchanges and when.

    Args:
        compression: a strategy, a user's class, a preset or the name of one.
        schedule: one of ``hvd.Schedule``; None: gradients, in every step.
        conversion: of the tensors that a user's class gets.
        more: other options.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the arguments exclude each other, or there is no preset of this name.
    """
    preset: Any = compression
    if isinstance(compression, str):
        known = presets()
        if compression not in known:
            raise ValueError(
                f"compression={compression!r} is no compression; use one of hvd.Compression, such "
                f"as hvd.Compression.fp16, or a name that hvd.singa takes: {', '.join(known)}"
            )
        preset = known[compression]()
    if isinstance(preset, Preset):
        if preset.schedule is not None and schedule is not None:
            raise ValueError(
                f"compression={compression!r} has the schedule {preset.schedule!r}; leave out "
                f"schedule={schedule!r}"
            )
        preset, schedule = preset.compression, preset.schedule or schedule
    strategy = check_strategy(preset, conversion)
    check_op(strategy, reduction.op)
    if schedule is not None and not isinstance(schedule, ExchangeSchedule):
        raise TypeError(
            f"schedule={schedule!r} is no schedule; use one of hvd.Schedule, such as "
            "hvd.Schedule.LocalSGD(every=8)"
        )
    if schedule is not None:
        schedule, passes = schedule.check(strategy, reduction, passes, sparse_as_dense)
    return Options(
        strategy, reduction, sparse_as_dense, passes, process_set, schedule, model, **more
    )
