"""Exchange: sends a model's gradients, bucket by bucket, while the backward pass computes them.

`GradientExchange._send_complete` decides when a bucket is sent: when it and all earlier ones of the
plan are complete, but neither while the ranks compare their parameters nor in steps weighted by
samples, whose weight only `finish` knows. Without cores to spare (``buckets.overlaps`` is False),
what is sent is only queued, and leaves in `finish`. An adapter decides when a gradient has arrived;
PyTorch calls `GradientHooks._on_gradient` (``hvdlite/torch/hooks.py``), which reports it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdlite.base.interrupts import Interrupted, uninterrupted
from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.engine import Engine, Handle
from hvdlite.engine.device import DeviceMemory
from hvdlite.engine.operation import Gather, Signature
from hvdlite.errors import HorovodInternalError, MismatchError, by_value
from hvdlite.gradients.bucket import Comparison, GradientBucket
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.metadata import ABSENT, CONVERTED, IN_SLOT, ONLY_AVERAGES
from hvdlite.gradients.replicas import ReplicaCheck
from hvdlite.observe import timeline

_ROW = "step"  # of the timeline
_all_arrived = attrgetter("all_arrived")
# The first entry of signatures.
_CHANGE = (
    "the change of the optimizer (call step() or zero_grad(), and add, remove and unfreeze "
    "parameters, on all ranks alike)"
)
_UNCHANGED = ((_CHANGE, "none"),)


class State(Enum):
    """The states of an exchange.

    COMPARING: the ranks compare their parameters, and send no bucket before. Then, in the same
        step, the exchange is LEARNING, or PROVISIONAL if a rank has joined.
    LEARNING: the first step of all ranks together. The order in which gradients arrive is recorded,
        and sent from rank 0 to all; after that the exchange is STEADY.
    PROVISIONAL: a rank that has joined makes its first step later and compares then, so after this
        step the exchange is COMPARING again.
    STEADY: the buckets follow the order that all ranks share.
    """

    COMPARING = auto()
    LEARNING = auto()
    PROVISIONAL = auto()
    STEADY = auto()


class GradientExchange:
    """The averaging of the gradients of a fixed list of parameters, step after step.

    `begin` opens a step. The owner then copies each gradient into its slot, once, and calls
    `mark`, which sends complete buckets. `finish` sends the rest, with zeros for gradients that are
    missing here, and waits.

    Ranks compare their parameters before the first exchange, and with every bucket which gradients
    they have.

    A sparse gradient is copied as a dense one, or marked and not copied: its owner exchanges it
    after `finish`, which reports on all ranks which parameters have any. These lose their slot in
    the next step, and are in ``sparse_parameters`` from then on.

    Args:
        engine, label, parameters, strategy, reduction, memory, state, check: as in
            `GradientBuckets`.

    Attributes:
        buckets: the slots of gradients and averages.
        sparse_parameters: numbers of the parameters that have had sparse gradients outside of their
            slots. These are empty now; their owner also exchanges any dense gradients of theirs.
        sparse_axes: after `finish`, by number, how many axes are sparse of each parameter that had
            such gradients on any rank.
        densified: the same of those that had sparse gradients in their slots.
        converted: after `finish`, whether `mark_converted` was called on any rank.
        in_flight: whether a gradient has been marked in a step that `finish` has not ended.
        weight: after `finish`, the factor of this rank's gradients in the average; the owner
            applies it to gradients that have no slot.
    """

    def __init__(
        self,
        engine: Engine,
        label: str,
        parameters: Sequence[Parameter],
        strategy: Strategy,
        reduction: Reduction,
        memory: DeviceMemory | None = None,
        state: StrategyState | None = None,
        check: ReplicaCheck | None = None,
    ) -> None:
        self.buckets = GradientBuckets(
            engine, label, parameters, strategy, reduction, _UNCHANGED, memory, state, check
        )
        self._changed: GradientBucket | None = None  # which tells of changes in this step
        self.sparse_parameters: frozenset[int] = frozenset()
        self.sparse_axes: dict[int, int] = {}
        self.densified: dict[int, int] = {}
        self.weight = 1.0
        self.converted = False
        self.in_flight = False
        self._names = [parameter.name for parameter in self.buckets.parameters]
        self._count = len(self._names)
        self._state = State.COMPARING
        self._comparison: Handle | None = None
        self._arrived: list[int] = []  # numbers, until the order is sent
        self._sent_order: Handle | None = None
        self._order: Sequence[int] = range(self._count)
        self._sent = 0
        self._began = 0  # the time, for the timeline
        self._is_weighted = False  # then buckets wait for `finish`, which knows the weight
        self._state_before: dict[str, Any] = {}  # of strategies, before the first step
        self._lock = threading.Lock()

    @property
    def learns_order(self) -> bool:
        """Return whether the order in which gradients arrive is recorded."""
        return self._state is not State.STEADY

    def begin(self, changes: Sequence[str] = ()) -> bool:
        """Open a step, before its first `mark` or its `finish`; pack the buckets again if needed.

        After the first step, they follow the order in which rank 0's gradients arrived; after the
        first sparse gradients of a parameter, it is one of ``sparse_parameters``. Every rank begins
        every step, even without gradients: otherwise it could not finish the buckets of the others.
        If the ranks compare their replicas in this step, they compare the state at this call.

        Args:
            changes: a description of what the owner exchanges from now on beside or instead of
                these parameters. Ranks that differ fail together, with the first bucket.

        Returns:
            Whether the slots have been replaced by other arrays.
        """
        packed = False
        # The order is received here and not in `finish`, where waiting for it would order the
        # steps of several exchanges, which may come in another order on other ranks.
        has_order = self._sent_order is not None
        if has_order:
            self._receive_order()
        if has_order or not self.sparse_parameters.issuperset(self.sparse_axes):
            self.sparse_parameters = self.sparse_parameters.union(self.sparse_axes)
            packed = self.buckets.pack(self._order, self.sparse_parameters)
        if self.buckets.check is not None and self.buckets.all:
            self.buckets.all[0].snapshot = self.buckets.snapshot()
        if changes:
            self._changed = self.buckets.all[0]
            unchanged = self.buckets.signature[len(_UNCHANGED) :]
            self._changed.sign(Signature(((_CHANGE, ", ".join(changes)), *unchanged)))
        return packed

    def mark(self, *numbers: int, kinds: Mapping[int, int] = MappingProxyType({})) -> None:
        """Record that gradients are in their slots, and send the buckets that are complete.

        A marked slot may be read at any time and must not be written again. If this raises,
        `finish` still has to end the step, since earlier buckets have been sent.

        Args:
            kinds: of gradients that may be sparse, as in the buckets' metadata.

        Raises:
            ValueError: a gradient has been marked in this step before.
            HorovodInternalError: communication has failed before.
        """
        with self._lock:
            complete = False
            for number, kind in (*((number, IN_SLOT) for number in numbers), *kinds.items()):
                bucket, position = self.buckets.place(number)
                bucket.mark(position, position + 1, kind)
                complete = complete or not bucket.awaited
            self._record((*numbers, *kinds), complete)

    def mark_bucket(self, index: int) -> None:
        """Record that all gradients of a bucket are in their slots; see `mark`."""
        with self._lock:
            self.buckets.all[index].mark()
            self._record(self.buckets.plan[index], complete=True)

    def mark_converted(self) -> None:
        """Report to the other ranks that the parameters have a new dtype or size.

        Call it instead of marking the gradients of a step. `finish` then leaves the gradients
        unchanged, and every rank makes a new exchange, which compares the parameters.
        """
        self.mark(kinds=dict.fromkeys(range(self._count), CONVERTED))

    def finish(self, samples: int | None = None) -> list[bool]:
        """Send the buckets that have not been sent yet, and wait for all of them.

        Args:
            samples: the number of samples that this rank's gradients are averages of. The average
                over the ranks is weighted by it. All ranks pass it, from the first step on, or none
                does. Buckets are sent only here then, so all ranks finish several exchanges in the
                same order.

        Returns:
            For each parameter whether any rank had a gradient in its slot; if so its average is
            in its result slot, on every rank, unless it is one of ``sparse_parameters``.

        Raises:
            HorovodInternalError: the ranks disagree, one's gradient is sparse where another's
                is dense, or communication failed. The next step starts afresh.
            Interrupted: a signal handler is pending; call this method again.
            ValueError: ``samples`` with a sum, or after a step without ``samples``. The exchange
                has ended in this case, too.
        """
        ended = True
        try:
            refusal = self._set_samples(samples)
            self._complete()
            self.weight = self.buckets.all[0].weight if self.buckets.all else 1.0
            if self._state is State.LEARNING:
                self._send_order()
            if refusal:
                raise ValueError(refusal)
            found = self._read_kinds()
            self.buckets.count_step()
            return found
        except Interrupted:
            ended = False
            raise
        finally:
            if ended:
                self._end_step()

    def wait_for_order(self) -> None:
        """Wait for the order that `begin` needs; this wait can be interrupted."""
        if self._sent_order is not None:
            with contextlib.suppress(HorovodInternalError):  # `begin` raises it
                self._sent_order.wait()

    # Comparing

    def _compare(self) -> None:
        if self._comparison is None:
            name = f"{self.buckets.label}: its parameters"
            self._comparison = self.buckets.lane.submit(
                Comparison(name, self.buckets.signature, on_end=self._end_comparison)
            )

    def _end_comparison(self, together: bool) -> None:
        """Send the buckets that are complete already; called by the lane."""
        with self._lock:
            self._state = State.LEARNING if together else State.PROVISIONAL
            # If the lane refuses them, `finish` raises.
            with contextlib.suppress(HorovodInternalError):
                self._send_complete()

    def _wait_for_comparison(self) -> None:
        with self._lock:
            if self._state is not State.COMPARING:
                return
            self._compare()
            comparison = self._comparison
        assert comparison is not None
        try:
            comparison.wait()
        except HorovodInternalError:
            self._comparison = None
            raise

    # Learning the order

    def _send_order(self) -> None:
        """Send the order of the first step's gradients to all ranks."""
        self._state = State.STEADY
        # What has not arrived yet may arrive at any time: last, as in the plan.
        missing = sorted(set(range(self._count)) - set(self._arrived))
        order = np.array([*missing, *reversed(self._arrived)], np.int64).tobytes()
        name = f"{self.buckets.label}: the order of its gradients"
        signature = Signature((("batch_size", "given" if self._is_weighted else "not given"),))
        self._sent_order = self.buckets.lane.submit(Gather(name, signature, order))

    def _receive_order(self) -> None:
        """Wait for the order, which has been sent."""
        handle, self._sent_order = self._sent_order, None
        assert handle is not None
        order = np.frombuffer(handle.wait()[0], np.int64).tolist()
        self._order = order or self._order  # empty if rank 0 has joined

    # Sending buckets

    def _record(self, numbers: Sequence[int], complete: bool) -> None:
        self.in_flight = True
        if timeline.current is not None and not self._began:
            self._began = timeline.current.now()
        if self._state is not State.STEADY:
            self._arrived.extend(numbers)
        if self._state is State.COMPARING:
            self._compare()
        elif complete:
            self._send_complete()

    def _send_complete(self) -> None:
        while (
            not self._is_weighted
            and self._sent < len(self.buckets.all)
            and not self.buckets.all[self._sent].awaited
        ):
            self._send_next(begin=self.buckets.overlaps)

    def _send_next(self, begin: bool) -> None:
        if self._state is not State.STEADY and not self._sent:
            self._state_before = self.buckets.state.state_dict(self._names)
        self.buckets.submit(self._sent, begin)
        self._sent += 1

    def _complete(self) -> None:
        failure: HorovodInternalError | None = None
        try:
            if self._state is State.COMPARING:
                self._wait_for_comparison()
            with self._lock:
                while self._sent < len(self.buckets.all):
                    self._send_next(begin=False)
        finally:
            for bucket in self.buckets.all:  # all of them, even if one fails
                try:
                    bucket.wait()
                except HorovodInternalError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    # Weights

    @uninterrupted
    def _set_samples(self, samples: int | None) -> str:
        """Weight all buckets; return why that is impossible, if it is."""
        was_weighted = self._is_weighted
        if samples is not None and self.buckets.reduction.op is not ReduceOp.AVERAGE:
            return ONLY_AVERAGES
        if samples is not None and not was_weighted and self._state is State.STEADY:
            return (
                "batch_size comes after a step without it, and gradients have left without "
                "their weight; give it in every step, on all ranks"
            )
        self._is_weighted = samples is not None
        if samples is not None and not was_weighted:
            self._take_back()
        for bucket in self.buckets.all:
            bucket.samples = samples
        return ""

    def _take_back(self) -> None:
        """Send the buckets of the first step again, this time with weights.

        Ranks may have sent different buckets without weights, so first all ranks send all of them.
        """
        try:
            self._complete()
            if self._state is not State.PROVISIONAL:
                # A rank without batch_size sends no bucket again, but it does send the order.
                self._send_order()
                self._receive_order()
        finally:
            # Of these parameters alone: other exchanges may share the state.
            self.buckets.state.load_state_dict(self._state_before, self._names)
            with self._lock:
                self._sent = 0

    # The end of a step

    def _read_kinds(self) -> list[bool]:
        """Find out from the buckets' metadata which gradients the ranks had."""
        self.converted, self.sparse_axes, self.densified = False, {}, {}
        found = [True] * self._count
        if not all(map(_all_arrived, self.buckets.all)):
            found = self._read_all_kinds()
        if self.buckets.check is not None and not self.converted:
            self.buckets.check.end()
        return found

    def _read_all_kinds(self) -> list[bool]:
        # Should a rank die in the step, some buckets are of more ranks than others.
        ranks = max(len(bucket.kinds) for bucket in self.buckets.all)
        kinds = np.full((ranks, self._count), ABSENT, np.uint8)
        for members, bucket in zip(self.buckets.plan, self.buckets.all, strict=True):
            kinds[: len(bucket.kinds), members] = bucket.kinds
        self.converted = bool((kinds == CONVERTED).any())
        if self.converted:
            return [False] * self._count
        axes = kinds.max(axis=0) // 2
        found: list[bool] = ((kinds & IN_SLOT) != 0).any(axis=0).tolist()
        for number in np.flatnonzero(axes).tolist():
            self._check_kinds(number, kinds[:, number])
            (self.densified if found[number] else self.sparse_axes)[number] = int(axes[number])
        return found

    def _check_kinds(self, number: int, kinds: Any) -> None:
        """Require gradients of one kind on all ranks, or in slots, so that they can be added up."""
        different = set(kinds.tolist()) - {ABSENT}
        if len(different) == 1 or all(kind & IN_SLOT for kind in different):
            return
        members = self.buckets.lane.transport.members
        texts = {
            rank: "dense" if kind & IN_SLOT else f"sparse in {kind // 2} of its axes"
            for rank, kind in zip(members, kinds.tolist(), strict=False)
            if kind != ABSENT
        }
        raise MismatchError(
            f"the gradient of {self.buckets.parameters[number].name!r} is "
            f"{' and '.join(by_value(texts))}; set up the layer identically on all ranks, or wrap "
            "the optimizer with sparse_as_dense=True"
        )

    def _end_step(self) -> None:
        trace = timeline.current
        if trace is not None and self._began:
            now = trace.now()
            trace.complete(_ROW, timeline.STEP, self._began, now, exchange=self.buckets.label)
        self._began = 0
        self._sent = 0
        self._state_before = {}
        self._arrived = []
        if self._state is State.PROVISIONAL:
            self._state = State.COMPARING
            self._comparison = None
            self._is_weighted = False
        self.in_flight = False
        if self._changed is not None:
            self._changed.sign(self.buckets.signature)
            self._changed = None
        for bucket in self.buckets.all:
            bucket.begin_step()
