"""The exchange of a model's gradients, bucket by bucket, while they come about."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.arrays import describe
from hvdlite.engine import Engine, Handle, Operation
from hvdlite.engine.operation import Signature, digest
from hvdlite.engine.operations import Barrier
from hvdlite.engine.plan import plan_buckets
from hvdlite.errors import HorovodInternalError
from hvdlite.exchange import Bucket, Parameter, Reduction, Strategy
from hvdlite.settings import Settings
from hvdlite.transport import Transport


class GradientExchange:
    """Averages the gradients of a fixed list of parameters, step after step.

    In each step the owner copies every gradient that it has into its `slot` (by `put`, or
    in a way of its own, but once) and then calls `mark`. A bucket whose gradients are all
    there starts on its way at once. `finish` sends the rest, with zeros for gradients that
    are missing here, and waits.

    Ranks compare their parameters before the first exchange, and with every bucket which
    gradients are there.

    Args:
        engine: whose gradient lane is used.
        label: unique, and the same on all ranks; it begins the names of the buckets.
        parameters: in the order of their registration, the same on all ranks.
        strategy: what happens to a bucket on its way.
        reduction: sum or average.
        also: what else must be equal on all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        label: str,
        parameters: Sequence[Parameter],
        strategy: Strategy,
        reduction: Reduction,
        also: Signature = (),
    ) -> None:
        self._lane = engine.gradients
        self.label = label
        self._strategy = strategy
        self.parameters = tuple(parameters)
        settings = engine.settings
        self.plan = plan_buckets(
            self.parameters, settings.fusion_threshold, settings.first_bucket_size
        )
        self._signature = (*also, *_signature(self.parameters, strategy, reduction, settings))
        self._digest = digest(self._signature)
        self._steps = [
            _Step(Bucket([self.parameters[member] for member in members], reduction))
            for members in self.plan
        ]
        self._places = {
            member: (self._steps[index], position)
            for index, members in enumerate(self.plan)
            for position, member in enumerate(members)
        }
        self._launched = 0
        self._comparison: Handle | None = None
        self._agreed = False
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun that `finish` has not ended."""
        return any(step.present.any() for step in self._steps)

    def slot(self, number: int) -> Any:
        """Where the gradient of a parameter is to be copied, in the parameter's shape."""
        step, position = self._places[number]
        return step.bucket.send_slot(position)

    def result_slot(self, number: int) -> Any:
        """Where the average is after `finish`, until the next step."""
        step, position = self._places[number]
        return step.bucket.result_slot(position)

    def mark(self, number: int) -> None:
        """Tell that a gradient has been copied into its slot; start what is complete.

        A marked slot may be on its way already, so a second copy must not even be made:
        `put` refuses it, other owners have to. Where this raises, `finish` still has to end
        the step, since earlier buckets are on their way.

        In the first step they start as soon as the ranks have compared their parameters.

        Raises:
            ValueError: it has been marked in this step before.
            HorovodInternalError: communication has failed before.
        """
        step, position = self._places[number]
        with self._lock:
            step.mark(position)
            self._compare()
            if self._agreed:
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
            try:
                self._agree()
                with self._lock:
                    while self._launched < len(self._steps):
                        self._launch_next()
            finally:
                self._settle()
            for step in self._steps:
                step.wait()
            return [
                bool(step.presence[:, position].any())
                for step, position in (self._places[number] for number in range(len(self._places)))
            ]
        finally:
            self._reset()

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

    def exchange_bucket(self, index: int, gradients: Mapping[int, Any]) -> Any:
        """Exchange one bucket by itself, and wait for it.

        For an owner whose framework orders the buckets, in place of `mark` and `finish`. The
        parameters are compared across ranks each time, together with those of any other
        exchange of the same label, so such exchanges may take turns.

        Args:
            index: the bucket's position in ``plan``.
            gradients: those that are there, by the parameter's number.

        Returns:
            Bools of shape (ranks, parameters of the bucket): who had which gradient.

        Raises:
            ValueError: the bucket is on its way already, or a gradient has another shape.
            HorovodInternalError: as `finish`.
        """
        step = self._steps[index]
        for number in gradients:  # before any slot is written, or the step of another reset
            step.check(self._places[number][1])
        try:
            for number, gradient in gradients.items():
                self.put(number, gradient)
                step.mark(self._places[number][1])
            self._launch(index)
            step.wait()
            return step.presence
        finally:
            step.reset()

    def result(self, index: int) -> Any:
        """What `exchange_bucket` wrote, flat, in the order of ``plan[index]``."""
        return self._steps[index].bucket.result

    def compare(self) -> None:
        """Compare the parameters as `exchange_bucket` does, where there is no bucket.

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
            self._launch_next()

    def _launch_next(self) -> None:
        self._launch(self._launched)
        self._launched += 1

    def _launch(self, index: int) -> None:
        step = self._steps[index]
        for position in np.flatnonzero(~step.present):
            step.bucket.send_slot(int(position))[...] = 0
        operation = _BucketExchange(
            f"{self.label}: bucket {index}", self._signature, self._digest, self._strategy, step
        )
        step.handle = self._lane.submit(operation)

    def _settle(self) -> None:
        """Wait, whatever becomes of one, for the last: then slots may be written again."""
        for step in self._steps:
            with contextlib.suppress(HorovodInternalError):
                step.wait()

    def _reset(self) -> None:
        self._launched = 0
        for step in self._steps:
            step.reset()


class _Step:
    """A bucket, and how far it has come in the current step."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        # Which gradients are here, and after the exchange, which were there on each rank.
        self.present = np.zeros(len(bucket.parameters), bool)
        self.presence = np.zeros((0, len(self.present)), bool)
        self.absent = len(bucket.parameters)
        self.handle: Handle | None = None

    def check(self, position: int) -> None:
        if self.present[position]:
            name = self.bucket.parameters[position].name
            raise ValueError(
                f"the gradient of {name!r} was marked twice in one step; end the step by finish()"
            )

    def mark(self, position: int) -> None:
        self.check(position)
        self.present[position] = True
        self.absent -= 1

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    def reset(self) -> None:
        self.present[...] = False
        self.absent = len(self.present)
        self.handle = None


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


class _BucketExchange(Operation):
    """The exchange of one bucket; its payload says which gradients are there."""

    def __init__(
        self,
        name: str,
        signature: Signature,
        signature_digest: bytes,
        strategy: Strategy,
        step: _Step,
    ) -> None:
        super().__init__(name, signature, payload=np.packbits(step.present).tobytes())
        # Computed once, not for every bucket of every step.
        self._digest = signature_digest
        self._strategy = strategy
        self._step = step

    def digest(self) -> bytes:
        return self._digest

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        flags = np.array([np.frombuffer(payload, np.uint8) for payload in payloads])
        count = len(self._step.present)
        self._step.presence = np.unpackbits(flags, axis=1, count=count).astype(bool)
        if flags.any():
            self._strategy.exchange(self._step.bucket, transport)


def _signature(
    parameters: Sequence[Parameter], strategy: Strategy, reduction: Reduction, settings: Settings
) -> Signature:
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
