"""The exchange of a model's gradients, bucket by bucket, while they come about."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdlite import compression, timeline
from hvdlite.collectives.objects import BroadcastBytes
from hvdlite.compression import Bucket
from hvdlite.engine import Handle, Operation
from hvdlite.engine.agreement import ranks_text
from hvdlite.engine.control import Barrier
from hvdlite.engine.operation import Signature
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.replicas import ReplicaCheck
from hvdlite.gradients.report import ABSENT, CONVERTED, DENSE, ONLY_AVERAGES
from hvdlite.gradients.step import BucketStep
from hvdlite.interrupts import Interrupted, uninterrupted
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport

_ROW = "step"  # of the timeline
_HERE = b"\x01"  # what a rank that has not joined brings to the comparison


class GradientExchange(GradientBuckets):
    """Averages the gradients of a fixed list of parameters, step after step.

    In each step, which `begin` opens, the owner copies every gradient that it has into its
    `slot` (by `put`, or in a way of its own, but once) and then calls `mark`. A bucket whose
    gradients are all there starts on its way at once. `finish` sends the rest, with zeros for
    gradients that are missing here, and waits.

    Ranks compare their parameters before the first exchange, and with every bucket which
    gradients are there.

    A sparse gradient is marked and not copied: its owner exchanges it after `finish`, which
    says on all ranks alike of which parameters there are any. From the next step on these
    have no place in a bucket, and are `apart`.

    Args:
        *args, **kwargs: as `GradientBuckets`.
        check: what compares the ranks' replicas; None: nothing does.

    Attributes:
        apart: the parameters whose gradients were sparse before, by number. Their slots are
            empty, and their owner exchanges what dense gradients they have, too.
        sparse: after `finish`, of the parameters that had sparse gradients anywhere, by
            number, how many of the axes are sparse.
        converted: after `finish`, whether `mark_converted` was called on any rank.
        weight: after `finish`, what this rank's gradients were multiplied by before the average;
            its owner does that with those that have no place in a bucket.
    """

    def __init__(self, *args: Any, check: ReplicaCheck | None = None, **kwargs: Any) -> None:
        self.apart: frozenset[int] = frozenset()
        self.sparse: dict[int, int] = {}
        self.weight = 1.0
        self.converted = False
        super().__init__(*args, **kwargs)
        self._check = check
        self._sequence: Sequence[int] = range(len(self.parameters))
        # The order in which gradients came in the first step, until the plan follows it.
        self._order: list[int] | None = []
        self._reordering: Handle | None = None
        self._launched = 0
        self._began = 0  # when the step did, for the timeline
        self._comparison: Handle | None = None
        self._agreed = False
        self._holds = False  # whether buckets wait for `finish`, which knows their weight
        self._is_first = True  # whether other ranks may not know yet whether there are weights
        self._began_with: dict[str, Any] = {}  # what strategies remembered before such a step
        self._alone = False  # whether some rank had joined when the parameters were compared
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun that `finish` has not ended."""
        return any(step.begun for step in self._steps)

    def _planned(self, order: Sequence[int]) -> list[list[int]]:
        """Plan as usual, but for those apart, of which ranks only tell which are there."""
        plan = super()._planned([number for number in order if number not in self.apart])
        return [*plan, sorted(self.apart)] if self.apart else plan

    def _step(self, members: Sequence[int]) -> BucketStep:
        if self.apart.isdisjoint(members):
            return super()._step(members)
        told = [replace(self.parameters[number], shape=(0,)) for number in members]
        bucket = Bucket(told, self._reduction, self._lane.empty)
        return BucketStep(bucket, compression.DENSE, self._lane.members)

    def mark(self, *numbers: int, sparse: Mapping[int, int] = MappingProxyType({})) -> None:
        """Tell that gradients have been copied into their slots; start what is complete.

        A marked slot may be on its way already, so a second copy must not even be made:
        `put` refuses it, other owners have to. Where this raises, `finish` still has to end
        the step, since earlier buckets are on their way.

        In the first step they start as soon as the ranks have compared their parameters.

        Args:
            *numbers: of the parameters.
            sparse: of further ones, whose gradients are sparse, the numbers of sparse axes.

        Raises:
            ValueError: one has been marked in this step before.
            HorovodInternalError: communication has failed before.
        """
        if timeline.current is not None and not self._began:
            self._began = timeline.current.now()
        with self._lock:
            complete = False
            places: dict[BucketStep, list[int]] = {}
            for number in numbers:
                step, position = self._places[number]
                places.setdefault(step, []).append(position)
            for number, axes in sparse.items():
                step, position = self._places[number]
                places.setdefault(step, [])
                step.mark_sparse(position, axes)
            for step, positions in places.items():
                step.mark(*positions)
                if not step.absent:
                    complete = True
            if self._order is not None:
                self._order.extend((*numbers, *sparse))
            if not self._agreed:
                self._compare()
            elif complete:
                self._launch_complete()

    def mark_converted(self) -> None:
        """Tell the other ranks that the parameters have another dtype or size than before.

        In the place of all gradients of a step. After `finish`, which leaves all gradients as they
        are, every rank knows of it, and makes a new exchange, which compares the parameters.
        """
        self.mark(sparse=dict.fromkeys(range(len(self.parameters)), CONVERTED - DENSE))

    def finish(self, samples: int | None = None) -> list[bool]:
        """Exchange what is not yet on its way, and wait for all of it.

        Args:
            samples: of how many samples this rank's gradients are averages. The average over the
                ranks is weighted by it, so that it is that of all samples. All ranks give it, from
                the first step on, or none does; then all count alike. As it is told here, no
                bucket leaves before, so all ranks finish several exchanges in one order.

        Returns:
            For each parameter whether any rank had a dense gradient; if so its average is
            in its `result_slot`, on every rank, unless it is `apart`.

        Raises:
            HorovodInternalError: the ranks disagree, one's gradient is sparse where another's
                is dense, or communication failed. The next step begins anew.
            Interrupted: a signal's handler is to run; it is to be called again.
            ValueError: a sum is not weighted, or ``samples`` comes after a step without. The
                exchange is ended all the same.
        """
        ended = True
        try:
            with timeline.span(_ROW, timeline.SYNCHRONIZE):
                unfit = self._weigh(samples)
                self._complete()
            self.weight = self._steps[0].weight if self._steps else 1.0
            self._reorder()
            if unfit:
                raise ValueError(unfit)
            kinds = self._kinds()
            self.converted = bool((kinds == CONVERTED).any())
            if self.converted:
                return [False] * len(self.parameters)
            self.sparse = self._find_sparse(kinds)
            self._check_kinds(kinds)
            if self._check is not None:
                self._check.end()
            anywhere: list[bool] = (kinds == DENSE).any(axis=0).tolist()
            return anywhere
        except Interrupted:
            ended = False
            raise
        finally:
            if ended:
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

    @uninterrupted
    def _weigh(self, samples: int | None) -> str:
        """Weight all buckets; return why that cannot be, if it cannot."""
        held = self._holds
        if samples is not None and self._reduction.op is not ReduceOp.AVERAGE:
            return ONLY_AVERAGES
        if samples is not None and not held and not self._is_first:
            return (
                "batch_size comes after a step without it, and gradients have left without "
                "their weight; give it in every step, on all ranks"
            )
        self._holds = samples is not None
        if samples is not None and not held:
            self._take_back()
        for step in self._steps:
            step.samples = samples
        return ""

    def _take_back(self) -> None:
        """Let what has left in the first step, when nothing was known of weights, leave again.

        On one rank that may be some buckets, on another none, so all of them leave before.
        """
        try:
            self._complete()
            if not self._alone:
                # A rank that gives no batch_size sends no bucket again, but the order it does.
                self._reorder()
                self._new_order()
        finally:
            # Of these parameters: others' exchanges may share the state.
            self._state.load_state_dict(self._began_with, self._names())
            with self._lock:
                self._launched = 0

    def begin(self) -> bool:
        """Before the first `slot` or `mark` of a step, or its `finish`: pack the buckets anew.

        Where the ranks compare their replicas in this step, they do so as these are here.

        After the first step, they follow the order in which rank 0's gradients came. After a
        step with the first sparse gradients of a parameter, it is `apart`. Every rank begins
        every step, also one in which it has no gradients: it could not finish the others'
        buckets otherwise.

        Returns:
            Whether slots are other arrays now.

        Raises:
            HorovodInternalError: communication failed.
        """
        # Waited for here and not in `finish`, where it would order the steps of several
        # exchanges, which may come in another order on other ranks.
        packed = self._repack()
        if self._steps:
            self._steps[0].snapshot = self._snapshot()
        return packed

    def _repack(self) -> bool:
        if not self._new_order() and self.apart.issuperset(self.sparse):
            return False
        self.apart = self.apart.union(self.sparse)
        plan = self._planned(self._sequence)
        if plan == self.plan:
            return False
        self._pack(plan)
        return True

    def _reorder(self) -> None:
        """Send the order of the first step's gradients to all ranks."""
        if self._order is not None and not self._alone:
            came, self._order = self._order, None
            # What has not come yet may come at any time: last, as in the plan.
            rest = sorted(set(range(len(self.parameters))) - set(came))
            order = np.array([*rest, *reversed(came)], np.int64).tobytes()
            name = f"{self.label}: the order of its gradients"
            told = ("batch_size", "given" if self._holds else "not given")
            self._reordering = self._lane.submit(_Order(name, order, self._first, entries=[told]))

    def _new_order(self) -> bool:
        """Wait for the order, if it is on its way; return whether it was."""
        if self._reordering is None:
            return False
        self.wait_for_order()
        handle, self._reordering = self._reordering, None
        order = np.frombuffer(handle.wait(), np.int64).tolist()
        self._sequence = order or self._sequence  # none, where rank 0 has joined
        return True

    def wait_for_order(self) -> None:
        """Wait for what `begin` needs; the only one of its waits, which may be interrupted."""
        if self._reordering is not None:
            with contextlib.suppress(HorovodInternalError):  # `begin` raises it
                self._reordering.wait()

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

    def _begin(self, together: bool) -> None:
        """Start the buckets that were complete before the ranks had agreed."""
        with self._lock:
            self._agreed, self._alone = True, not together
            # If the lane takes no more, `finish` will say so.
            with contextlib.suppress(HorovodInternalError):
                self._launch_complete()

    def _launch_complete(self) -> None:
        while (
            not self._holds
            and self._launched < len(self._steps)
            and not self._steps[self._launched].absent
        ):
            self._launch_next(begin=self.overlaps)

    def _launch_next(self, begin: bool = True) -> None:
        if self._is_first and not self._launched:
            self._began_with = self._state.state_dict(self._names())
        self._launch(self._launched, begin)
        self._launched += 1

    def _names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters]

    def _settle(self) -> None:
        """Wait, whatever becomes of one, for the last."""
        for step in self._steps:
            step.settle()

    def _kinds(self) -> Any:
        """What gradients the ranks had, of shape (ranks, parameters)."""
        size = 0 if not self._steps else len(self._steps[0].kinds)
        kinds = np.zeros((size, len(self.parameters)), np.uint8)
        for members, step in zip(self.plan, self._steps, strict=True):
            kinds[:, members] = step.kinds
        return kinds

    def _find_sparse(self, kinds: Any) -> dict[int, int]:
        """Of the parameters with sparse gradients, how many of the axes are sparse."""
        most = kinds.max(axis=0, initial=ABSENT)
        return {int(number): int(most[number]) - DENSE for number in np.flatnonzero(most > DENSE)}

    def _check_kinds(self, kinds: Any) -> None:
        """Refuse gradients that cannot be added up because they are not of one kind."""
        for number in self.sparse:
            column = kinds[:, number]
            if len({*column.tolist()} - {ABSENT}) > 1:
                by_kind = [
                    f"{_kind_text(kind)} on {ranks_text(self._ranks_of(column == kind))}"
                    for kind in np.unique(column[column != ABSENT]).tolist()
                ]
                raise MismatchError(
                    f"the gradient of {self.parameters[number].name!r} is "
                    f"{' and '.join(by_kind)}; make the layer alike on all ranks, or wrap the "
                    "optimizer with sparse_as_dense=True"
                )

    def _ranks_of(self, positions: Any) -> list[int]:
        return [self._lane.members[rank] for rank in np.flatnonzero(positions).tolist()]

    def _reset(self) -> None:
        trace = timeline.current
        if trace is not None and self._began:
            trace.complete(_ROW, timeline.STEP, self._began, trace.now(), exchange=self.label)
        self._began = 0
        self._launched = 0
        self._is_first, self._began_with = self._alone, {}
        if self._order is not None:  # the step has failed, or is to be the first once more
            self._order = []
        if self._alone:
            # A rank that had joined comes to its first step later, and expects the others there.
            self._alone = self._agreed = self._holds = False
            self._comparison = None
        for step in self._steps:
            step.reset()


def _kind_text(kind: int) -> str:
    return "dense" if kind == DENSE else f"sparse in {kind - DENSE} of its axes"


class _Comparison(Operation):
    """The comparison of the parameters; where it succeeds, the exchange begins.

    Args:
        name: of the operation.
        signature: what is compared.
        begin: called where it succeeds, with whether every rank has taken part.
    """

    stands_in = True

    def __init__(self, name: str, signature: Signature, begin: Callable[[bool], None]) -> None:
        super().__init__(name, signature, payload=_HERE)
        self._begin = begin

    def stand_in(self) -> Callable[[], Operation]:
        return partial(Barrier, self.name)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        self._begin(all(payloads))


class _Order(BroadcastBytes):
    """The order of the first rank's gradients; of none, if it has joined."""

    stands_in = True

    def stand_in(self) -> Callable[[], Operation]:
        given = [entry for entry in self.signature if entry[0] == "batch_size"]
        return partial(_Order, self.name, b"", self._root, entries=given)
