"""Bucket: gradients of one dtype in one send array, and the operation that exchanges them.

A `GradientBucket` knows one step of training: which gradients have arrived, on which ranks, with
which weights. Its arrays are a `hvdlite.compression.bucket.Bucket`, all that a strategy sees. The
strategy averages them: its `Reduction` has the factors, `Scaling` (``base/reduction.py``) applies
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.base.arrays import set_first
from hvdlite.base.reduction import ReduceOp, is_floating
from hvdlite.compression import Bucket, Parameter, Reduction, Strategy, exchange_bucket
from hvdlite.engine import Handle, Operation
from hvdlite.engine.operation import Signature
from hvdlite.gradients import metadata, replicas
from hvdlite.gradients.finite import check_finite
from hvdlite.gradients.metadata import IN_SLOT, Metadata
from hvdlite.gradients.replicas import Snapshot
from hvdlite.observe import timeline
from hvdlite.transport import Transport

_PRESENT = b"\x01"  # the first byte of the payload of a rank that has not joined


class GradientBucket(Operation):
    """A bucket: its arrays, its progress in the current step, and its exchange.

    It is submitted once in every step. Its payload says which gradients this rank has.

    Args:
        arrays: the send and the result array; without them on a rank that has joined.
        strategy: how the bucket travels.

    Attributes:
        awaited: the number of gradients that have not arrived in this step.
        samples: the number of samples that the gradients are averages of; None: all ranks count
            the same.
        snapshot: of this rank's replica, if the ranks compare them with this exchange.
        pending: the handle of the exchange, once it has been submitted in this step.
        abandoned: whether the exchange has lost its waiter, because another bucket failed or an
            exception ended the wait.
        kinds: after the exchange, as in `Metadata`.
        all_arrived: after the exchange, whether all ranks had all gradients, as dense ones.
        weight: after the exchange, the factor of this rank's gradients.
        is_plain: whether it travels by a plain allreduce of arrays on the host.
        keeps_result: whether all exchanges write to one result array.
        release: called with each result array that is its owner's from then on.
        checks_finite: whether averages that are not finite are refused.
        corrupted: whether a planted fault has changed a gradient of this step in its slot.
    """

    stands_in = True

    def __init__(
        self,
        name: str,
        signature: Signature,
        arrays: Bucket,
        strategy: Strategy,
    ) -> None:
        Operation.__init__(self, name, signature)
        self.arrays = arrays
        self.strategy = strategy
        self.nbytes = sum(parameter.nbytes for parameter in arrays.parameters)
        self._size = len(arrays.parameters)
        self._all_in_slots = bytes([IN_SLOT]) * self._size
        self._state_before: Any = None
        self._everywhere: Metadata | None = None  # where all ranks have all gradients, as dense
        self.kinds: Any = None
        self.all_arrived = False
        self.weight = 1.0
        self.keeps_result = self.checks_finite = False
        self.release: Callable[[Any], None] = lambda result: None
        reduction = arrays.reduction
        is_plain = strategy.is_identity and reduction.predivide == 1.0
        self.is_plain = is_plain and reduction.op is not ReduceOp.ADASUM and self.memory is None
        self._has_result = True
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the progress."""
        self._kinds_here = bytearray(self._size)
        self.awaited = self._size
        self.samples: int | None = None
        self.snapshot: Snapshot | None = None
        self._is_usual = False  # all gradients are there, and there is nothing to report
        self.pending: Handle | None = None
        self.abandoned = self.corrupted = False
        self.arrays.zero_copy = {}

    @property
    def title(self) -> str:
        """Return the name and the first parameters, for messages: users did not choose the name."""
        names = [repr(parameter.name) for parameter in self.arrays.parameters]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return f"{self.name!r} (gradients of {', '.join(names[:2])}{more})"

    def mark(self, start: int = 0, stop: int | None = None, kind: int = IN_SLOT) -> None:
        """Record that all gradients have arrived, or those of a range of positions.

        Raises:
            ValueError: one of them has arrived before in this step.
        """
        stop = self._size if stop is None else stop
        if self.awaited < self._size:
            for position in range(start, stop):
                if self._kinds_here[position]:
                    name = self.arrays.parameters[position].name
                    raise ValueError(
                        f"the gradient of {name!r} was marked twice in one step; end the step by "
                        "finish()"
                    )
        self._kinds_here[start:stop] = bytes([kind]) * (stop - start)
        self.awaited -= stop - start

    def prepare_submission(self) -> None:
        """Write the payload, and zeros into the slots that have no gradient."""
        is_complete = self._kinds_here == self._all_in_slots
        if not is_complete or (self.samples == 0 and self.memory is not None):
            self.fill_gaps()
        exchanges = self.arrays.state.count if self.strategy.stateful else None
        snapshot = self.snapshot
        replica = b"" if snapshot is None else snapshot.digest
        if snapshot is not None and snapshot.compares_data and self.memory is None:
            self.arrays.copy_zero_copy_parts()
            replica = snapshot.with_gradients(self.arrays.send)
        if not self._has_result:
            try:
                self.arrays.allocate_result()
                self._has_result = True
            except OSError as error:
                if error.errno is not None:  # else of a closed lane, which says so itself
                    self.failure = f"{self.title} failed: {error}"
        self.places = None
        if self.is_plain and self._has_result:
            self.places = self.arrays.send, self.arrays.result
        self._is_usual = is_complete and exchanges is None and self.samples is None
        self.payload = metadata.encode(self._kinds_here, exchanges, self.samples, replica)

    def fill_gaps(self) -> None:
        """Zero the slots of gradients that are absent or sparse, or the average of no samples."""
        for position, kind in enumerate(self._kinds_here):
            if self.samples == 0 or not kind & IN_SLOT:
                self.arrays.send_slot(position)[...] = 0

    def wait(self) -> None:
        """Wait for the exchange, if it has been submitted."""
        if self.pending is not None:
            self.pending.wait()
            if self._has_result and not self.keeps_result:
                self.release(self.arrays.result)
                self._has_result = False

    def order_writes(self) -> None:
        """Order writes into slots after the last exchange; on the host its end does that."""

    def _exchanged(self) -> Bucket:
        """Return the arrays as the transport takes them."""
        return self.arrays

    def receive_metadata(self, payloads: Sequence[bytes], transport: Transport) -> Metadata:
        """Store the metadata of all ranks; compare their replicas, if any sends a digest."""
        are_equal = payloads.count(self.payload) == len(payloads)
        if not are_equal or (self.snapshot is not None and self.snapshot.compares_data):
            pairs = [metadata.split_replica(payload, self._size) for payload in payloads]
            payloads, digests = zip(*pairs, strict=True)
            if any(digests):
                replicas.compare(digests, self.snapshot, transport)
        elif self.snapshot is not None:
            self.snapshot.succeed()
            payloads = [metadata.split_replica(self.payload, self._size)[0]] * len(payloads)
        is_usual = are_equal and self._is_usual
        found = self._everywhere if is_usual else None
        if found is None or len(found.kinds) != len(payloads):
            found = metadata.decode(payloads, self._size, transport.members)
            self._everywhere = found if is_usual else self._everywhere
        self.kinds = found.kinds
        self.all_arrived = is_usual or bool((found.kinds == IN_SLOT).all())
        self.weight = 1.0 if found.weights is None else float(found.weights[transport.rank])
        self.arrays.count, self.arrays.absent = found.exchanges, found.absent
        return found

    def contribution(self, name: str) -> str:
        """Return the name of the first dense gradient, or ``name`` if its gradient is here."""
        if not is_floating(self.arrays.parameters[0].dtype):
            return ""
        for parameter, kind in zip(self.arrays.parameters, self._kinds_here, strict=True):
            if kind & IN_SLOT and parameter.size and name in ("", parameter.name):
                return parameter.name
        return ""

    def corrupt(self, name: str, value: float) -> None:
        names = [parameter.name for parameter in self.arrays.parameters]
        self.arrays.copy_zero_copy_parts()
        set_first(self.arrays.send_slot(names.index(name)), value)
        self.corrupted = True

    def protect(self) -> None:
        if self.strategy.stateful:
            self._state_before = self.arrays.state.copy()

    def restore(self) -> None:
        if self.strategy.stateful:
            self.arrays.state.restore(self._state_before)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Exchange the bucket, unless no rank has a dense gradient in it."""
        if self.arrays.send is None:  # on a rank that has joined
            # In the same kind of memory as the others' gradients.
            self.arrays = Bucket(self.arrays.parameters, self.arrays.reduction, transport.empty)
            self.arrays.send[...] = 0
        found = self.receive_metadata(payloads, transport)
        if not self.nbytes or found.is_empty:
            return None
        arrays, strategy = self._exchanged(), self.strategy
        with timeline.span(self.lane, timeline.EXCHANGE):
            weight = None if found.weights is None else self.weight
            exchange_bucket(strategy, arrays, transport, weight)
        self.sent = arrays.sent
        if self.checks_finite:
            transport.complete()
            check_finite(arrays, transport)
        if strategy.stateful:
            arrays.state.count = found.exchanges + 1
            arrays.state.set_owner(transport.rank, transport.size)
        return None

    def stand_in(self) -> Callable[[], Operation]:
        described = self.strategy, self.arrays.parameters, self.arrays.reduction
        return partial(_stand_in, self.name, self.signature, *described, self.checks_finite)


def _stand_in(
    name: str,
    signature: Signature,
    strategy: Strategy,
    parameters: Sequence[Parameter],
    reduction: Reduction,
    checks_finite: bool,
) -> GradientBucket:
    """Make the exchange of a bucket on a rank that has joined."""
    bucket = GradientBucket(name, signature, Bucket(parameters, reduction, None), strategy)
    bucket.checks_finite = checks_finite
    return bucket


class Comparison(Operation):
    """The comparison of a layout and of replicas, without a bucket.

    Args:
        snapshot: of this rank's replica, if the ranks compare them.
        on_end: called on success, with whether no rank has joined.
    """

    stands_in = True

    def __init__(
        self,
        name: str,
        signature: Signature,
        snapshot: Snapshot | None = None,
        on_end: Callable[[bool], None] | None = None,
    ) -> None:
        digest = b"" if snapshot is None else snapshot.digest
        super().__init__(name, signature, _PRESENT + digest)
        self._snapshot = snapshot
        self._on_end = on_end

    def stand_in(self) -> Callable[[], Operation]:
        return partial(Comparison, self.name, self.signature)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Compare the ranks' replicas, if one has sent a digest of its own."""
        digests = [payload.removeprefix(_PRESENT) for payload in payloads]
        if any(digests):
            replicas.compare(digests, self._snapshot, transport)
        if self._on_end is not None:
            self._on_end(all(payloads))
