"""The exchange of a model's gradients, bucket by bucket, while they come about."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.arrays import describe
from hvdlite.engine import Engine, Handle, Operation
from hvdlite.engine.device import DeviceMemory
from hvdlite.engine.operation import Signature
from hvdlite.engine.operations import Barrier, BroadcastBytes
from hvdlite.engine.plan import plan_buckets
from hvdlite.errors import HorovodInternalError
from hvdlite.exchange import Bucket, Parameter, Reduction, Strategy
from hvdlite.gradients.device_step import DeviceStep
from hvdlite.gradients.step import BucketStep
from hvdlite.settings import Settings
from hvdlite.transport import Transport

_ROW = "step"  # of the timeline


class GradientExchange:
    """Averages the gradients of a fixed list of parameters, step after step.

    In each step, which `begin` opens, the owner copies every gradient that it has into its
    `slot` (by `put`, or in a way of its own, but once) and then calls `mark`. A bucket whose
    gradients are all there starts on its way at once. `finish` sends the rest, with zeros for
    gradients that are missing here, and waits.

    Ranks compare their parameters before the first exchange, and with every bucket which
    gradients are there.

    Args:
        engine: whose gradient lane is used.
        label: unique, and the same on all ranks; it begins the names of the buckets.
        parameters: in the order of their registration, the same on all ranks.
        strategy: what happens to a bucket on its way.
        reduction: sum or average.
        also: what else must be equal on all ranks, in pairs.
        memory: of the device that all gradients lie on; slots are tensors there, and so are
            results, which all steps share: their owner copies from them. None: the host's.
    """

    def __init__(
        self,
        engine: Engine,
        label: str,
        parameters: Sequence[Parameter],
        strategy: Strategy,
        reduction: Reduction,
        also: Iterable[tuple[str, Any]] = (),
        memory: DeviceMemory | None = None,
    ) -> None:
        self._lane = engine.gradients
        self.label = label
        self._strategy = strategy
        self.parameters = tuple(parameters)
        self._reduction = reduction
        self._memory = memory
        settings = engine.settings
        self._caps = settings.fusion_threshold, settings.first_bucket_size
        self._signature = Signature(
            (
                *also,
                ("device", "cpu" if memory is None else "cuda"),
                *_signature(self.parameters, strategy, reduction, settings),
            )
        )
        self._pack(self._planned(range(len(self.parameters))))
        # The order in which gradients came in the first step, until the plan follows it.
        self._order: list[int] | None = []
        self._reordering: Handle | None = None
        # A device works beside its host in any case.
        self._overlaps = settings.overlap != "0" or memory is not None
        self._launched = 0
        self._began = 0  # when the step did, for the timeline
        self._comparison: Handle | None = None
        self._agreed = False
        self._lock = threading.Lock()

    def _planned(self, order: Sequence[int]) -> list[list[int]]:
        """Buckets for gradients that come in the reverse of ``order``."""
        ordered = [self.parameters[number] for number in order]
        plan = plan_buckets(ordered, *self._caps)
        return [[order[position] for position in members] for members in plan]

    def _pack(self, plan: list[list[int]]) -> None:
        self.plan = plan
        self._steps = [self._step([self.parameters[n] for n in members]) for members in plan]
        self._places = {
            member: (self._steps[index], position)
            for index, members in enumerate(self.plan)
            for position, member in enumerate(members)
        }

    def _step(self, parameters: Sequence[Parameter]) -> BucketStep:
        if self._memory is None:
            return BucketStep(Bucket(parameters, self._reduction, self._lane.empty))
        return DeviceStep(Bucket(parameters, self._reduction, self._memory.empty), self._memory)

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun that `finish` has not ended."""
        return any(step.begun for step in self._steps)

    def slot(self, number: int) -> Any:
        """Where the gradient of a parameter is to be copied, in the parameter's shape."""
        step, position = self._places[number]
        return step.bucket.send_slot(position)

    def result_slot(self, number: int) -> Any:
        """Where the average is after `finish`.

        The memory is the caller's as long as it likes, except after `keep_result`.
        """
        step, position = self._places[number]
        return step.bucket.result_slot(position)

    def keep_result(self, index: int) -> None:
        """Let all exchanges of a bucket write to one result: their owner copies from it."""
        self._steps[index].renews = False

    def mark(self, *numbers: int) -> None:
        """Tell that gradients have been copied into their slots; start what is complete.

        A marked slot may be on its way already, so a second copy must not even be made:
        `put` refuses it, other owners have to. Where this raises, `finish` still has to end
        the step, since earlier buckets are on their way.

        In the first step they start as soon as the ranks have compared their parameters.

        Raises:
            ValueError: one has been marked in this step before.
            HorovodInternalError: communication has failed before.
        """
        if timeline.current is not None and not self._began:
            self._began = timeline.current.now()
        with self._lock:
            complete = False
            for number in numbers:
                step, position = self._places[number]
                step.mark(position)
                if not step.absent:
                    complete = True
            if self._order is not None:
                self._order.extend(numbers)
            if not self._agreed:
                self._compare()
            elif complete:
                self._launch_complete()

    def finish(self) -> list[bool]:
        """Exchange what is not yet on its way, and wait for all of it.

        Returns:
            For each parameter whether any rank had a gradient; if so its average is in
            its `result_slot`, on every rank.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed. The next
                step begins anew.
        """
        try:
            with timeline.span(_ROW, timeline.SYNCHRONIZE):
                self._complete()
            self._reorder()
            return self._anywhere()
        finally:
            self._reset()

    def _complete(self) -> None:
        try:
            self._agree()
            with self._lock:
                while self._launched < len(self._steps):
                    self._launch_next(begin=False)
        finally:
            self._settle()
        for step in self._steps:
            step.wait()

    def begin(self) -> bool:
        """Before the first `slot` or `mark` of a step: once, pack the buckets anew.

        After the first step, they follow the order in which rank 0's gradients came.

        Returns:
            Whether slots are other arrays now.

        Raises:
            HorovodInternalError: communication failed.
        """
        if self._reordering is None:
            return False
        # Waited for here and not in `finish`, where it would order the steps of several
        # exchanges, which may come in another order on other ranks.
        handle, self._reordering = self._reordering, None
        plan = self._planned(np.frombuffer(handle.wait(), np.int64).tolist())
        if plan == self.plan:
            return False
        self._pack(plan)
        return True

    def _reorder(self) -> None:
        """Send the order of the first step's gradients to all ranks."""
        if self._order is not None:
            came, self._order = self._order, None
            # What has not come yet may come at any time: last, as in the plan.
            rest = sorted(set(range(len(self.parameters))) - set(came))
            order = np.array([*rest, *reversed(came)], np.int64).tobytes()
            name = f"{self.label}: the order of its gradients"
            self._reordering = self._lane.submit(BroadcastBytes(name, order, 0))

    def put(self, number: int, gradient: Any) -> None:
        """Copy a gradient into its slot; `mark` it then.

        Raises:
            ValueError: it has another shape than the parameter, or has been marked in this
                step before.
        """
        step, position = self._places[number]
        step.check(position)
        slot = step.bucket.send_slot(position)
        if gradient.shape != slot.shape:
            raise ValueError(
                f"the gradient of {self.parameters[number].name!r} is {describe(gradient)}; "
                f"expected {describe(slot)}, as the parameter is"
            )
        slot[...] = gradient

    def start_bucket(self, index: int, gradients: Mapping[int, Any]) -> None:
        """Copy a bucket's gradients, and start its exchange.

        For an owner whose framework orders the buckets, in place of `mark` and `finish`. The
        parameters are compared across ranks each time, together with those of any other
        exchange of the same label, so such exchanges may take turns.

        Args:
            index: the bucket's position in ``plan``.
            gradients: those that are there, by the parameter's number.

        Raises:
            ValueError: the bucket is on its way already, or a gradient has another shape.
            HorovodInternalError: communication has failed before.
        """
        step = self._steps[index]
        if step.handle is not None:
            if not step.handle.done():
                raise ValueError(
                    f"bucket {index} of {self.label!r} is on its way; call finish_bucket() first"
                )
            step.reset()  # it belonged to a step that was given up before its end
        try:
            for number, gradient in gradients.items():
                self.put(number, gradient)
                step.mark(self._places[number][1])
            self._launch(index, begin=self._overlaps)
        except BaseException:
            step.reset()
            raise

    def finish_bucket(self, index: int) -> Any:
        """Wait for a bucket that has been started.

        Returns:
            Bools of shape (ranks, parameters of the bucket): who had which gradient.

        Raises:
            ValueError: it has not been started.
            HorovodInternalError: as `finish`.
        """
        step = self._steps[index]
        if step.handle is None:
            raise ValueError(f"bucket {index} of {self.label!r} has not been started")
        try:
            step.wait()
            return step.presence
        finally:
            step.reset()

    def result(self, index: int) -> Any:
        """What an exchange wrote, flat, in the order of ``plan[index]``.

        The memory is the caller's as long as it likes: the next exchange uses another.
        """
        return self._steps[index].bucket.result

    def compare(self) -> None:
        """Compare the parameters as `start_bucket` does, where there is no bucket.

        Raises:
            HorovodInternalError: the ranks differ.
        """
        self._lane.run(_NoBucket(f"{self.label}: bucket 0", self._signature))

    def _compare(self) -> None:
        """Start to compare the parameters across ranks, before anything is exchanged."""
        if self._comparison is None:
            self._comparison = self._lane.submit(
                _Comparison(f"{self.label}: its parameters", self._signature, self._begin)
            )

    def _agree(self) -> None:
        """Wait until the parameters have been compared."""
        with self._lock:
            self._compare()
            comparison = self._comparison
        assert comparison is not None
        try:
            comparison.wait()
        except HorovodInternalError:
            self._comparison = None
            raise

    def _begin(self) -> None:
        """Start the buckets that were complete before the ranks had agreed."""
        with self._lock:
            self._agreed = True
            # If the lane takes no more, `finish` will say so.
            with contextlib.suppress(HorovodInternalError):
                self._launch_complete()

    def _launch_complete(self) -> None:
        while self._launched < len(self._steps) and not self._steps[self._launched].absent:
            self._launch_next(begin=self._overlaps)

    def _launch_next(self, begin: bool = True) -> None:
        self._launch(self._launched, begin)
        self._launched += 1

    def _launch(self, index: int, begin: bool = True) -> None:
        step = self._steps[index]
        step.fill()
        operation = step.operation(f"{self.label}: bucket {index}", self._signature, self._strategy)
        step.handle = self._lane.submit(operation, begin)

    def _settle(self) -> None:
        """Wait, whatever becomes of one, for the last: then slots may be written again."""
        for step in self._steps:
            with contextlib.suppress(HorovodInternalError):
                step.wait()

    def _anywhere(self) -> list[bool]:
        """For each parameter whether any rank had a gradient."""
        found = [False] * len(self.parameters)
        for members, step in zip(self.plan, self._steps, strict=True):
            for number, has in zip(members, step.presence.any(axis=0).tolist(), strict=True):
                found[number] = has
        return found

    def _reset(self) -> None:
        trace = timeline.current
        if trace is not None and self._began:
            trace.complete(_ROW, timeline.STEP, self._began, trace.now(), exchange=self.label)
        self._began = 0
        self._launched = 0
        for step in self._steps:
            step.reset()


class _Comparison(Barrier):
    """The comparison of the parameters; where it succeeds, the exchange begins."""

    def __init__(self, name: str, signature: Signature, begin: Callable[[], None]) -> None:
        super().__init__(name, signature)
        self._begin = begin

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        self._begin()


class _NoBucket(Operation):
    """What has no bucket to exchange, and still must be the same on all ranks."""

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Do nothing more."""


def _signature(
    parameters: Sequence[Parameter], strategy: Strategy, reduction: Reduction, settings: Settings
) -> tuple[tuple[str, Any], ...]:
    """What must be equal on all ranks."""
    return (
        ("op", reduction.op.name.capitalize()),
        ("gradient_predivide_factor", reduction.predivide),
        ("compression", strategy.name),
        *(
            (f"parameter {number}", f"{parameter.name!r} {describe(parameter)}")
            for number, parameter in enumerate(parameters)
        ),
        ("the number of parameters", len(parameters)),
        # Together with the parameters they make the plan.
        ("HVDLITE_FUSION_THRESHOLD", settings.fusion_threshold),
        ("HVDLITE_FIRST_BUCKET_SIZE", settings.first_bucket_size),
    )
