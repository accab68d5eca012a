"""The gradients of a model in buckets, which `GradientExchange` (``exchange.py``) sends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvdlite import compression
from hvdlite.base.arrays import describe
from hvdlite.base.interrupts import leave, uninterrupted
from hvdlite.base.reduction import ReduceOp
from hvdlite.base.reduction import check as check_dtype
from hvdlite.compression import Bucket, Parameter, Reduction, Strategy, StrategyState, check_op
from hvdlite.engine import Engine
from hvdlite.engine.device import DeviceMemory
from hvdlite.engine.operation import Signature
from hvdlite.errors import HorovodInternalError, NotFiniteError
from hvdlite.gradients.bucket import Comparison, GradientBucket
from hvdlite.gradients.device import DeviceGradientBucket
from hvdlite.gradients.finite import tell_left_out
from hvdlite.gradients.metadata import ABSENT
from hvdlite.gradients.plan import describe_exchange, plan_for
from hvdlite.gradients.replicas import ReplicaCheck, Snapshot
from hvdlite.observe import status
from hvdlite.world import parts

#: Bytes of a gradient from which on the elements that no other rank reads are exchanged without a
#: copy. For a smaller gradient the bookkeeping takes longer than the copy.
LEAST_ZERO_COPY = 2**20


class GradientBuckets:
    """The buckets of a fixed list of parameters.

    A framework that orders the buckets itself calls `start_bucket` and then `finish_bucket` for
    every bucket in each step. Ranks compare their parameters with every bucket, and which
    gradients are there. For gradients that arrive one by one there is `GradientExchange`.

    Args:
        engine: whose gradient lane is used.
        label: unique, and the same on all ranks; it begins the names of the buckets.
        parameters: in the order of their registration, the same on all ranks.
        also: what else must be equal on all ranks, in pairs.
        memory: of the device that all gradients lie on. Slots are tensors there, and so are
            results, which all steps share: their owner copies from them. None: host memory.
        state: what strategies remember of the parameters, kept up to date; None: nothing yet.
        check: compares the ranks' replicas; None: replicas may differ.

    Attributes:
        plan: for each bucket its parameters, by number.
        all: the buckets, in the order of the plan.
        lane: which carries the buckets' metadata.
        signature: everything that must be equal on all ranks.
        overlaps: whether buckets leave as soon as they are complete, rather than all at the end.

    Raises:
        ValueError: Adasum is not defined for a parameter's dtype, or the strategy does not
            compute it.
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
        check: ReplicaCheck | None = None,
    ) -> None:
        parts.current.refuse(
            label,
            "use hvd.DistributedOptimizer of PyTorch, or of Keras 3 on TensorFlow, wrapped after "
            "hvd.init()",
        )
        self.lane = engine.gradients
        # All collectives of a device go through one lane: NCCL needs one order on all ranks.
        self._bucket_lane = engine.gradients if memory is None else engine.named
        self.label = label
        self.parameters = tuple(parameters)
        self._strategy = strategy
        self.state = StrategyState() if state is None else state
        self.reduction = reduction
        self._memory = memory
        check_op(strategy, reduction.op)
        if reduction.op is ReduceOp.ADASUM:
            for parameter in self.parameters:
                check_dtype(reduction.op, parameter.dtype)
        self._settings = engine.settings
        self.check = check
        # The same for the buckets that replace these in a new world.
        self._key = label, hash(self.parameters)
        # A device works beside its host in any case.
        self.overlaps = engine.settings.overlap != "0" or memory is not None
        self._entries = (
            *also,
            ("device", "cpu" if memory is None else "cuda"),
            *describe_exchange(self.parameters, strategy, reduction),
        )
        self._left_out: NotFiniteError | None = None  # why this step is
        self.all: list[GradientBucket] = []
        self.plan: list[list[int]] = [[-1]]  # none yet
        self.pack(range(len(self.parameters)))

    def pack(self, order: Sequence[int], sparse: Collection[int] = ()) -> bool:
        """Make buckets for gradients that arrive in the reverse of an order.

        Args:
            order: numbers of all parameters. With a strategy that is not ``is_elementwise``, that
                of their registration counts, so that results depend on no framework and no step.
            sparse: numbers of parameters without a slot, of which the ranks only tell each other
                whether they have gradients.

        Returns:
            Whether the plan has changed; else the buckets stay as they are.
        """
        if not self._strategy.is_elementwise:
            order = range(len(self.parameters))
        dense = [number for number in order if number not in sparse]
        planned = plan_for([self.parameters[n] for n in dense], self._strategy, self._settings)
        plan = [[dense[position] for position in members] for members in planned]
        if sparse:
            plan.append(sorted(sparse))
        if plan == self.plan:
            return False
        self.plan = plan
        self.signature = Signature((*self._entries, ("the buckets", plan)))
        self.all = [
            self._make_bucket(index, members, index == len(planned))
            for index, members in enumerate(plan)
        ]
        self._places = {
            number: (self.all[index], position)
            for index, members in enumerate(plan)
            for position, number in enumerate(members)
        }
        return True

    def _make_bucket(self, index: int, members: Sequence[int], is_sparse: bool) -> GradientBucket:
        parameters = [self.parameters[number] for number in members]
        strategy = self._strategy.choose(parameters[0])
        name = f"{self.label}: bucket {index}"
        if is_sparse:
            empty = [replace(parameter, shape=(0,)) for parameter in parameters]
            arrays = Bucket(empty, self.reduction, self.lane.empty)
            return GradientBucket(name, self.signature, arrays, compression.DENSE)
        if self._memory is None:
            arrays = Bucket(parameters, self.reduction, self.lane.empty, self.state)
            bucket = GradientBucket(name, self.signature, arrays, strategy)
            bucket.checks_finite = self._settings.not_finite != "pass"
            bucket.release = self.lane.release
            return bucket
        arrays = Bucket(parameters, self.reduction, self._memory.empty, self.state)
        return DeviceGradientBucket(name, self.signature, arrays, strategy, self._memory)

    def place(self, number: int) -> tuple[GradientBucket, int]:
        """Return the bucket of a parameter, and its position there."""
        return self._places[number]

    def slot(self, number: int) -> Any:
        """Return the array into which a gradient is to be copied, in the parameter's shape.

        On a device, an owner that keeps slots calls `GradientBucket.order_writes` itself, on every
        stream, before it writes.
        """
        bucket, position = self._places[number]
        bucket.order_writes()
        return bucket.arrays.send_slot(position)

    def result_slot(self, number: int) -> Any:
        """Return the array that has the average after the exchange.

        The memory is the caller's as long as needed, unless the bucket keeps its result array.
        """
        bucket, position = self._places[number]
        return bucket.arrays.result_slot(position)

    def zero_copy_range(self, number: int, size: int | None = None) -> slice:
        """Return which elements of a flat gradient no other rank reads; they need no copy.

        It holds as long as the slots do.

        Args:
            size: of the gradient and its neighbours in the bucket that come with it; None: it
                comes alone.
        """
        bucket, position = self._places[number]
        if not bucket.is_plain:
            return slice(0, 0)
        arrays, size = bucket.arrays, self.parameters[number].size if size is None else size
        among, start = self.lane.zero_copy_range(arrays.send.size), arrays.bounds[position]
        first, last = max(among.start - start, 0), min(among.stop - start, size)
        return slice(first, last) if first < last else slice(0, 0)

    def set_zero_copy(self, number: int, first: int, part: Any) -> None:
        """Exchange the `zero_copy_range` of a gradient from where it lies, without a copy.

        The other elements are copied into the slot, and the gradient is marked as usual.

        Args:
            first: the position of these elements in the flat gradient.
            part: the elements, flat; they must not change until the step has ended.
        """
        bucket, position = self._places[number]
        if part.size:
            bucket.arrays.zero_copy[bucket.arrays.bounds[position] + first] = part

    def exchange(
        self,
        find: Callable[[int], Any],
        samples: int | None = None,
        check: ReplicaCheck | None = None,
        leaves_out: bool = False,
    ) -> list[bool]:
        """Exchange all buckets; all of them start before the first is waited for.

        Args:
            find: returns this rank's gradient, by the parameter's number; None: there is none.
            samples, check: as in `start_bucket`.
            leaves_out: as in `finish_bucket`.

        Returns:
            For each parameter whether any rank has a gradient, whose average `result_slot` returns.

        Raises:
            Exception: that of ``find``, `start_bucket` or `finish_bucket`. All buckets that have
                started have ended, unless a signal's handler has raised.
        """
        started: list[int] = []
        errors: list[Exception] = []

        @uninterrupted  # so that a signal's handler finds all buckets started, or none
        def start() -> None:
            for index, members in enumerate(self.plan):
                own = {number: find(number) for number in members}
                here = {number: each for number, each in own.items() if each is not None}
                self.start_bucket(index, here, samples, check)
                started.append(index)

        try:
            start()
        except Exception as error:
            errors.append(error)
        finally:
            leave()
        found = [False] * len(self.parameters)
        for index in started:
            try:
                anywhere = self.finish_bucket(index, leaves_out).any(axis=0).tolist()
            except HorovodInternalError as error:
                errors.append(error)
            else:
                for number, has in zip(self.plan[index], anywhere, strict=True):
                    found[number] = has
        if errors:
            raise errors[0]
        return found

    def start_bucket(
        self,
        index: int,
        gradients: Mapping[int, Any],
        samples: int | None = None,
        check: ReplicaCheck | None = None,
    ) -> None:
        """Copy a bucket's gradients, or what other ranks read of them, and start its exchange.

        The parameters are compared across ranks each time, together with those of any other
        exchange of the same label, so such exchanges may take turns.

        Args:
            gradients: those of this rank, by the parameter's number. Neighbours in the bucket may
                come as one flat array, by the first one's number. They must not change until
                `finish_bucket`.
            samples: the number of samples that the gradients are averages of; None: all ranks
                count the same, also those that have joined.
            check: compares the ranks' replicas, together with bucket 0.

        Raises:
            ValueError: the bucket is being exchanged already, or a gradient has another shape.
            HorovodInternalError: communication has failed before.
        """
        bucket = self.all[index]
        if bucket.pending is not None:
            if not (bucket.abandoned or bucket.pending.done()):
                raise ValueError(
                    f"bucket {index} of {self.label!r} is on its way; call finish_bucket() first"
                )
            with suppress(HorovodInternalError):
                bucket.wait()  # left over from an abandoned step; its slots are to be written
            bucket.begin_step()
        try:
            for number, gradient in gradients.items():
                self._bring_gradient(number, gradient)
            bucket.samples = samples
            if index == 0:
                self._left_out = None
                self.check = check
                bucket.snapshot = self.snapshot()
            self.submit(index, begin=self.overlaps)
        except BaseException:
            bucket.begin_step()
            raise

    def _bring_gradient(self, number: int, gradient: Any) -> None:
        """Mark a gradient and copy it into its slot, without its zero-copy range if it is large."""
        bucket, first = self._places[number]
        arrays = bucket.arrays
        start, stop = arrays.bounds[first], arrays.bounds[first] + gradient.size
        end = bisect_left(arrays.bounds, stop, first + 1)  # the position after the last gradient's
        shape = self.parameters[number].shape if end == first + 1 else (stop - start,)
        if gradient.shape != shape or end == len(arrays.bounds) or arrays.bounds[end] != stop:
            raise ValueError(
                f"the gradient of {self.parameters[number].name!r} is {describe(gradient)}; "
                f"expected {describe(arrays.send_slot(first))}, as the parameter is"
            )
        bucket.mark(first, end)
        bucket.order_writes()
        flat = gradient.reshape(-1)  # a copy where it is not contiguous, which is as good
        zero_copy, slot = slice(0, 0), arrays.send[start:stop]
        if gradient.nbytes >= LEAST_ZERO_COPY and gradient.dtype == slot.dtype:
            zero_copy = self.zero_copy_range(number, gradient.size)
        for part in (slice(0, zero_copy.start), slice(zero_copy.stop, None)):
            slot[part] = flat[part]
        self.set_zero_copy(number, zero_copy.start, flat[zero_copy])

    def finish_bucket(self, index: int, leaves_out: bool = False) -> Any:
        """Wait for a bucket that has been started.

        Args:
            leaves_out: whether the caller, with HVDLITE_NOT_FINITE=skip, leaves out a step whose
                averages are not finite. Such averages are then no error here, and `count_step`
                logs that.

        Returns:
            Bools of shape (ranks, parameters of the bucket): which rank had which gradient.

        Raises:
            ValueError: it has not been started.
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        bucket = self.all[index]
        if bucket.pending is None:
            raise ValueError(f"bucket {index} of {self.label!r} has not been started")
        try:
            bucket.wait()
            if index == 0 and self.check is not None:
                self.check.end()
            return bucket.kinds != ABSENT
        except BaseException as error:
            leaves_out = leaves_out and self._settings.not_finite == "skip"
            if leaves_out and isinstance(error, NotFiniteError):
                self._left_out = self._left_out or error
                return bucket.kinds != ABSENT
            for other in self.all:
                other.abandoned = other.pending is not None
            raise
        finally:
            if bucket.pending.done():
                bucket.begin_step()
            # Otherwise a signal handler has raised, and other ranks still need the slots.

    def count_step(self) -> None:
        """Count a step whose buckets have all been exchanged, or log that it is left out."""
        if self._left_out is None:
            status.count_step(self._key)
        else:
            tell_left_out(self._left_out)

    def result_of(self, numbers: Sequence[int]) -> Any:
        """Return the average of a gradient in its shape, or those of neighbours in a bucket, flat.

        The caller may keep the memory: the next exchange allocates another array.
        """
        if len(numbers) == 1:
            return self.result_slot(numbers[0])
        bucket, first = self._places[numbers[0]]
        bounds = bucket.arrays.bounds
        return bucket.arrays.result[bounds[first] : bounds[first + len(numbers)]]

    def compare(self, check: ReplicaCheck | None = None) -> None:
        """Compare the parameters as `start_bucket` does, where there is no bucket."""
        self.check = check
        name = f"{self.label}: bucket 0"
        self.lane.run(Comparison(name, self.signature, self.snapshot()))
        if check is not None:
            check.end()

    def snapshot(self) -> Snapshot | None:
        """Return this rank's part of the comparison of replicas, if this step has one."""
        if self.check is None or len(self.lane.transport.members) == 1:
            return None
        return self.check.begin(self.lane, self._settings)

    def submit(self, index: int, begin: bool = True) -> None:
        """Submit the exchange of a bucket as it is now."""
        bucket = self.all[index]
        bucket.prepare_submission()
        bucket.pending = self._bucket_lane.submit(bucket, begin)
