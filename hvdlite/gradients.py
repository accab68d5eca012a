"""The exchange of a model's gradients, bucket by bucket, while they come about."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.arrays import describe
from hvdlite.engine import Engine, Handle, Operation
from hvdlite.engine.operation import Signature, digest
from hvdlite.engine.operations import Barrier
from hvdlite.engine.plan import plan_buckets
from hvdlite.exchange import Bucket, Parameter, Reduction, Strategy
from hvdlite.transport import Transport


class GradientExchange:
    """Averages the gradients of a fixed list of parameters, step after step.

    In each step the owner copies every gradient that it has into its `slot` and calls
    `mark`. A bucket whose gradients are all there starts on its way at once. `finish`
    sends the rest, with zeros for gradients that are missing here, and waits.

    Ranks compare their parameters before the first exchange, and with every bucket which
    gradients are there.

    Args:
        engine: whose gradient lane is used.
        label: unique, and the same on all ranks; it begins the names of the buckets.
        parameters: in the order of their registration, the same on all ranks.
        strategy: what happens to a bucket on its way.
        reduction: sum or average.
    """

    def __init__(
        self,
        engine: Engine,
        label: str,
        parameters: Sequence[Parameter],
        strategy: Strategy,
        reduction: Reduction,
    ) -> None:
        self._lane = engine.gradients
        self._label = label
        self._strategy = strategy
        self.parameters = tuple(parameters)
        settings = engine.settings
        self.plan = plan_buckets(
            self.parameters, settings.fusion_threshold, settings.first_bucket_size
        )
        self._signature = _signature(self.parameters, strategy, reduction, len(self.plan))
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
        self._checked = False
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

    def is_marked(self, number: int) -> bool:
        """Whether this step's gradient of a parameter is in its slot."""
        step, position = self._places[number]
        return bool(step.present[position])

    def mark(self, number: int) -> None:
        """Tell that a gradient is in its slot; starts every bucket that is complete.

        Raises:
            HorovodInternalError: the ranks disagree on the parameters (in the first step).
        """
        step, position = self._places[number]
        with self._lock:
            step.mark(position)
            while self._launched < len(self._steps) and not self._steps[self._launched].absent:
                self._launch_next()

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
            with self._lock:
                while self._launched < len(self._steps):
                    self._launch_next()
            for step in self._steps:
                step.wait()
            return [
                bool(step.present_anywhere[position])
                for step, position in (self._places[number] for number in range(len(self._places)))
            ]
        finally:
            self._reset()

    def exchange_bucket(self, index: int) -> list[bool]:
        """Exchange one bucket by itself, and wait for it.

        For an owner whose framework orders the buckets, in place of `finish`; `mark` must
        not be used then, the gradients that are there are given by `claim`.

        Returns:
            For each of the bucket's parameters whether any rank had a gradient.

        Raises:
            HorovodInternalError: as `finish`.
        """
        step = self._steps[index]
        try:
            with self._lock:
                self._check()
            self._launch(index)
            step.wait()
            return [bool(flag) for flag in step.present_anywhere]
        finally:
            step.reset()

    def claim(self, number: int) -> None:
        """Tell that a gradient is in its slot, and start nothing."""
        step, position = self._places[number]
        step.mark(position)

    def _launch_next(self) -> None:
        try:
            self._check()
            self._launch(self._launched)
        except BaseException:
            self._reset()
            raise
        self._launched += 1

    def _check(self) -> None:
        """Compare the parameters across ranks, once, before anything is exchanged."""
        if not self._checked:
            self._lane.run(Barrier(f"{self._label}: its parameters", self._signature))
            self._checked = True

    def _launch(self, index: int) -> None:
        step = self._steps[index]
        for position in np.flatnonzero(~step.present):
            step.bucket.send_slot(int(position))[...] = 0
        operation = _BucketExchange(
            f"{self._label}: bucket {index}", self._signature, self._digest, self._strategy, step
        )
        step.handle = self._lane.submit(operation)

    def _reset(self) -> None:
        self._launched = 0
        for step in self._steps:
            step.reset()


class _Step:
    """A bucket, and how far it has come in the current step."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.present = np.zeros(len(bucket.parameters), bool)
        self.present_anywhere = self.present.copy()
        self.absent = len(bucket.parameters)
        self.handle: Handle | None = None

    def mark(self, position: int) -> None:
        self.present[position] = True
        self.absent -= 1

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    def reset(self) -> None:
        self.present[...] = False
        self.absent = len(self.present)
        self.handle = None


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
        union = np.unpackbits(np.bitwise_or.reduce(flags, axis=0), count=len(self._step.present))
        self._step.present_anywhere[...] = union.astype(bool)
        if union.any():
            self._strategy.exchange(self._step.bucket, transport)


def _signature(
    parameters: Sequence[Parameter], strategy: Strategy, reduction: Reduction, buckets: int
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
        ("the number of buckets", buckets),
    )
