"""The gradients of a model in buckets, each of which can be exchanged by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hvdlite.arrays import describe
from hvdlite.compression import Bucket, Parameter, Reduction, Strategy, StrategyState, check_op
from hvdlite.engine import Engine, Operation
from hvdlite.engine.device import DeviceMemory
from hvdlite.engine.operation import Signature
from hvdlite.engine.plan import plan_buckets
from hvdlite.gradients.device_step import DeviceStep
from hvdlite.gradients.replicas import ReplicaCheck, Snapshot, compare
from hvdlite.gradients.step import BucketStep
from hvdlite.reduction import ReduceOp, check
from hvdlite.settings import Settings
from hvdlite.transport import Transport

#: Bytes from which on what other ranks do not read of a gradient had better be lent than copied.
#: To look after that takes longer than the copy of a smaller one.
LEAST_LENT = 2**20


class GradientBuckets:
    """A fixed list of parameters in buckets, for a framework that orders the buckets itself.

    In each step the owner calls `start_bucket` and then `finish_bucket` for every bucket.
    Ranks compare their parameters with every bucket, and which gradients are there.

    Args:
        engine: whose gradient lane is used.
        label: unique, and the same on all ranks; it begins the names of the buckets.
        parameters: in the order of their registration, the same on all ranks.
        strategy: what happens to a bucket on its way.
        reduction: sum, average or Adasum.
        also: what else must be equal on all ranks, in pairs.
        memory: of the device that all gradients lie on; slots are tensors there, and so are
            results, which all steps share: their owner copies from them. None: the host's,
            as Adasum needs it.
        state: what strategies remember of the parameters, kept up to date; None: nothing yet.

    Attributes:
        label: as given.
        parameters: as given.
        plan: for each bucket its parameters, by number.
        overlaps: whether buckets leave as soon as they are complete, and not together at last.

    Raises:
        ValueError: Adasum has no meaning for a parameter's dtype or on a device, or the
            strategy does not compute it.
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
        state: StrategyState | None = None,
    ) -> None:
        self._lane = engine.gradients
        # A device's collectives all go through one lane: NCCL needs them in one order on all ranks.
        self._bucket_lane = engine.gradients if memory is None else engine.named
        self._first = self._lane.members[0]
        self.label = label
        self.parameters = tuple(parameters)
        self._strategy = strategy
        self._state = StrategyState() if state is None else state
        self._reduction = reduction
        self._memory = memory
        _check_op(reduction.op, strategy, self.parameters, memory)
        settings = engine.settings
        self._settings = settings
        self._check: ReplicaCheck | None = None
        # A device works beside its host in any case.
        self.overlaps = settings.overlap != "0" or memory is not None
        self._entries = (
            *also,
            ("device", "cpu" if memory is None else "cuda"),
            *_signature(self.parameters, strategy, reduction, settings),
        )
        self._pack(self._planned(range(len(self.parameters))))

    def _planned(self, order: Sequence[int]) -> list[list[int]]:
        """Buckets for gradients that come in the reverse of ``order``."""
        ordered = [self.parameters[number] for number in order]
        plan = plan_for(ordered, self._strategy, self._settings)
        return [[order[position] for position in members] for members in plan]

    def _pack(self, plan: list[list[int]]) -> None:
        self.plan = plan
        self._signature = Signature((*self._entries, ("the buckets", plan)))
        self._steps = [self._step(members) for members in plan]
        self._places = {
            member: (self._steps[index], position)
            for index, members in enumerate(self.plan)
            for position, member in enumerate(members)
        }

    def _step(self, members: Sequence[int]) -> BucketStep:
        parameters = [self.parameters[number] for number in members]
        strategy, ranks = self._strategy.choose(parameters[0]), self._lane.members
        if self._memory is None:
            bucket = Bucket(parameters, self._reduction, self._lane.empty, self._state)
            return BucketStep(bucket, strategy, ranks)
        bucket = Bucket(parameters, self._reduction, self._memory.empty, self._state)
        return DeviceStep(bucket, strategy, ranks, self._memory)

    def slot(self, number: int) -> Any:
        """Where the gradient of a parameter is to be copied, in the parameter's shape."""
        step, position = self._places[number]
        step.follow()
        return step.bucket.send_slot(position)

    def follow(self, index: int) -> None:
        """Let the current stream write a bucket's slots after its last exchange has read them.

        `slot` and `put` see to it; an owner on a device that keeps the slots calls this itself,
        on every stream, before it writes.
        """
        self._steps[index].follow()

    def _checked(self, number: int, gradient: Any) -> Any:
        """The slot of a gradient that fits into it, and has not come yet."""
        step, position = self._places[number]
        step.check(position)
        step.follow()
        slot = step.bucket.send_slot(position)
        if gradient.shape != slot.shape:
            raise ValueError(
                f"the gradient of {self.parameters[number].name!r} is {describe(gradient)}; "
                f"expected {describe(slot)}, as the parameter is"
            )
        return slot

    def unread(self, number: int) -> slice:
        """Which elements of a parameter's flat gradient need no copy, if they are lent; see `lend`.

        They are those that no other rank reads. It holds as long as the slots do.
        """
        step, position = self._places[number]
        if self._memory is not None:
            return slice(0, 0)
        return step.unread(position, self._lane.unread(step.bucket.send.size))

    def lend(self, number: int, first: int, part: Any) -> None:
        """Let the exchange read `unread` elements of a gradient where they lie.

        The others are to be copied into its slot, and it is to be marked, as usual.

        Args:
            number: the parameter's.
            first: of these elements, in the flat gradient.
            part: they themselves, flat; they have to stay as they are until the step has ended.
        """
        step, position = self._places[number]
        if part.size:
            step.bucket.lent[step.bucket.bounds[position] + first] = part

    def result_slot(self, number: int) -> Any:
        """Where the average is after `finish`.

        The memory is the caller's as long as it likes, except after `keep_result`.
        """
        step, position = self._places[number]
        return step.bucket.result_slot(position)

    def bucket_of(self, number: int) -> int:
        """The position in ``plan`` of a parameter's bucket."""
        return self._steps.index(self._places[number][0])

    def renew_slots(self, index: int) -> None:
        """Let a bucket have other slots from now on, between steps: the old ones are the caller's.

        Their memory is the caller's as long as it likes, as that of `result_slot` is.
        """
        bucket = self._steps[index].bucket
        self._lane.release(bucket.send)
        bucket.renew_send()

    def keep_result(self, index: int) -> None:
        """Let all exchanges of a bucket write to one result: their owner copies from it."""
        self._steps[index].renews = False

    def put(self, number: int, gradient: Any) -> None:
        """Copy a gradient into its slot; `mark` it then.

        Raises:
            ValueError: it has another shape than the parameter, or has been marked in this
                step before.
        """
        self._checked(number, gradient)[...] = gradient

    def start_bucket(
        self,
        index: int,
        gradients: Mapping[int, Any],
        samples: int | None = None,
        check: ReplicaCheck | None = None,
    ) -> None:
        """Copy a bucket's gradients, or lend parts of them, and start its exchange.

        For an owner whose framework orders the buckets, in place of `mark` and `finish`. The
        parameters are compared across ranks each time, together with those of any other
        exchange of the same label, so such exchanges may take turns.

        Args:
            index: the bucket's position in ``plan``.
            gradients: those that are there, by the parameter's number. They have to stay as they
                are until `finish_bucket`.
            samples: of how many the gradients are averages; None: all ranks' count alike, also
                those that have joined.
            check: what compares the ranks' replicas, together with bucket 0.

        Raises:
            ValueError: the bucket is on its way already, or a gradient has another shape.
            HorovodInternalError: communication has failed before.
        """
        step = self._steps[index]
        if step.handle is not None:
            if not (step.given_up or step.handle.done()):
                raise ValueError(
                    f"bucket {index} of {self.label!r} is on its way; call finish_bucket() first"
                )
            step.settle()  # it belonged to a step that was given up before its end
            step.reset()
        try:
            for number, gradient in gradients.items():
                self._bring(number, gradient)
                step.mark(self._places[number][1])
            step.samples = samples
            if index == 0:
                self._check = check
                step.snapshot = self._snapshot()
            self._launch(index, begin=self.overlaps)
        except BaseException:
            step.reset()
            raise

    def _bring(self, number: int, gradient: Any) -> None:
        """Copy what other ranks read of a gradient, and lend the rest if that is worth it."""
        slot = self._checked(number, gradient)
        unread = self.unread(number) if gradient.nbytes >= LEAST_LENT else slice(0, 0)
        if unread.start == unread.stop or gradient.dtype != slot.dtype:
            slot[...] = gradient
            return
        flat = gradient.reshape(-1)  # a copy where it is not contiguous, which is as good
        for part in (slice(0, unread.start), slice(unread.stop, None)):
            slot.reshape(-1)[part] = flat[part]
        self.lend(number, unread.start, flat[unread])

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
            if index == 0 and self._check is not None:
                self._check.end()
            return step.presence
        except BaseException:
            for other in self._steps:
                other.given_up = other.handle is not None
            raise
        finally:
            if step.handle.done():
                step.reset()
            # Else a signal's handler has raised: the others need what is in the bucket's slots.

    def result(self, index: int) -> Any:
        """What an exchange wrote, flat, in the order of ``plan[index]``.

        The memory is the caller's as long as it likes: the next exchange uses another.
        """
        return self._steps[index].bucket.result

    def compare(self, check: ReplicaCheck | None = None) -> None:
        """Compare the parameters as `start_bucket` does, where there is no bucket.

        Args:
            check: as there.

        Raises:
            HorovodInternalError: the ranks differ.
        """
        self._check = check
        self._lane.run(_NoBucket(f"{self.label}: bucket 0", self._signature, self._snapshot()))
        if check is not None:
            check.end()

    def _snapshot(self) -> Snapshot | None:
        """Return this rank's part of the comparison of replicas, if this step has one."""
        if self._check is None or len(self._lane.members) == 1:
            return None
        return self._check.begin(self._lane, self._settings)

    def _launch(self, index: int, begin: bool = True) -> None:
        step = self._steps[index]
        step.fill()
        operation = step.operation(f"{self.label}: bucket {index}", self._signature)
        step.handle = self._bucket_lane.submit(operation, begin)


def plan_for(
    parameters: Sequence[Parameter], strategy: Strategy, settings: Settings
) -> list[list[int]]:
    """Pack parameters into buckets, each of which travels by one strategy; see `plan_buckets`."""
    kinds = [strategy.choose(parameter) for parameter in parameters]
    return plan_buckets(parameters, settings.fusion_threshold, settings.first_bucket_size, kinds)


def describe_sources(
    sources: Sequence[Parameter], sparse: Collection[int] = ()
) -> tuple[tuple[str, Any], ...]:
    """What ranks compare of all that they have gradients of, whatever their framework.

    Args:
        sources: in their order.
        sparse: positions of those that do not travel in buckets.

    Returns:
        Pairs, for the argument ``also`` of `GradientBuckets`.
    """
    return (
        *(
            (f"source {number}", f"{source.name!r} {describe(source)}")
            for number, source in enumerate(sources)
        ),
        ("the number of sources", len(sources)),
        *(
            (
                f"the gradient of {source.name!r} (dense everywhere with sparse_as_dense=True)",
                "IndexedSlices" if number in sparse else "dense or None",
            )
            for number, source in enumerate(sources)
        ),
    )


def _check_op(
    op: ReduceOp,
    strategy: Strategy,
    parameters: Sequence[Parameter],
    memory: DeviceMemory | None,
) -> None:
    check_op(strategy, op)
    if op is ReduceOp.ADASUM:
        if memory is not None:
            raise ValueError("Adasum combines gradients on the host; leave out memory")
        for parameter in parameters:
            check(op, parameter.dtype)


class _NoBucket(Operation):
    """What has no bucket to exchange, and still must be the same on all ranks."""

    stands_in = True

    def __init__(self, name: str, signature: Signature, snapshot: Snapshot | None = None) -> None:
        super().__init__(name, signature, b"" if snapshot is None else snapshot.digest)
        self._snapshot = snapshot

    def stand_in(self) -> Callable[[], Operation]:
        """What makes the same."""
        return partial(_NoBucket, self.name, self.signature)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Compare the ranks' replicas, if one has brought a digest of its own; no more.

        Raises:
            MismatchError: on all ranks; they differ.
        """
        if any(payloads):
            compare(payloads, self._snapshot, transport)


def _signature(
    parameters: Sequence[Parameter], strategy: Strategy, reduction: Reduction, settings: Settings
) -> tuple[tuple[str, Any], ...]:
    """What must be equal on all ranks."""
    return (
        ("op", reduction.op.name.capitalize()),
        ("gradient_predivide_factor", reduction.predivide),
        ("compression", strategy.name),
        *(
            (f"parameter {number}", _description(parameter, strategy))
            for number, parameter in enumerate(parameters)
        ),
        ("the number of parameters", len(parameters)),
        # Together with the parameters they make the plan.
        ("HVDLITE_FUSION_THRESHOLD", settings.fusion_threshold),
        ("HVDLITE_FIRST_BUCKET_SIZE", settings.first_bucket_size),
    )


def _description(parameter: Parameter, strategy: Strategy) -> str:
    """What must be equal of a parameter; a rule may give each a strategy of its own."""
    chosen = strategy.choose(parameter)
    by = "" if chosen is strategy else f" by {chosen.name}"
    return f"{parameter.name!r} {describe(parameter)}{by}"
