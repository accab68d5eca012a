"""One bucket in the current step, and the operation that exchanges it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite import timeline
from hvdlite.compression import Bucket, Parameter, Reduction, Strategy, exchange_bucket
from hvdlite.engine import Handle, Operation
from hvdlite.engine.operation import Signature
from hvdlite.errors import HorovodInternalError
from hvdlite.gradients import replicas, report
from hvdlite.gradients.replicas import Snapshot
from hvdlite.gradients.report import ABSENT, DENSE, Report
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport


class BucketStep:
    """A bucket, and how far it has come in the current step.

    Args:
        bucket: as below.
        strategy: as below.
        members: by what numbers messages call the ranks.

    Attributes:
        bucket: the arrays.
        absent: how many gradients are not here yet.
        strategy: by which it travels.
        kinds: after the exchange, numbers of shape (ranks, parameters): 0 where a rank had no
            gradient, 1 for a dense one, and for a sparse one 1 more than its sparse axes.
        weight: after the exchange, what this rank's gradients were multiplied by.
        samples: of how many samples the gradients are averages; None: all ranks' count alike.
        snapshot: of this rank's replica, if the ranks compare them with this exchange.
        handle: of the exchange, once it is on its way.
        renews: whether each exchange writes to a result array of its own.
        given_up: whether nobody waits for the exchange, because another bucket's has failed, or
            an exception has ended the wait.
    """

    def __init__(self, bucket: Bucket, strategy: Strategy, members: Sequence[int]) -> None:
        self.bucket = bucket
        self.strategy = strategy
        self._members = members
        self._size = len(bucket.parameters)
        self._all_dense = bytes([DENSE]) * self._size
        self.kinds: Any = None
        self.weight = 1.0
        self.renews = True
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self.present = bytearray(self._size)
        self.absent = self._size
        self.samples: int | None = None
        self.snapshot: Snapshot | None = None
        self.handle: Handle | None = None
        self.given_up = False
        self.bucket.lent = {}

    @property
    def title(self) -> str:
        """Return its name for messages, by its first parameters."""
        names = [repr(parameter.name) for parameter in self.bucket.parameters]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return f"gradients of {', '.join(names[:2])}{more}"

    @property
    def begun(self) -> bool:
        """Whether a gradient has come."""
        return self.absent < self._size

    @property
    def presence(self) -> Any:
        """After the exchange, bools of shape (ranks, parameters): who had which gradient."""
        return self.kinds != ABSENT

    @property
    def has_gaps(self) -> bool:
        """Whether a gradient has not come, or not as a dense one."""
        return self.present != self._all_dense

    def check(self, position: int) -> None:
        """Refuse a second gradient of a parameter in one step.

        Raises:
            ValueError: there has been one.
        """
        if self.present[position]:
            name = self.bucket.parameters[position].name
            raise ValueError(
                f"the gradient of {name!r} was marked twice in one step; end the step by finish()"
            )

    def mark(self, *positions: int) -> None:
        """Take note of gradients."""
        for position in positions:
            if self.present[position]:
                self.check(position)
            self.present[position] = DENSE
            self.absent -= 1

    def mark_sparse(self, position: int, sparse_axes: int) -> None:
        """Take note that a gradient is sparse, and comes to the others in another way."""
        self.mark(position)
        self.present[position] = DENSE + sparse_axes

    def unread(self, position: int, among: slice) -> slice:
        """The elements of a gradient of which no other rank reads anything.

        Args:
            position: its parameter's.
            among: such elements of the bucket, if a strategy needs no more than that.
        """
        reduction = self.bucket.reduction
        is_plain = self.strategy.is_identity and reduction.before.is_identity
        if not is_plain or reduction.op is ReduceOp.ADASUM:
            return slice(0, 0)
        start, stop = self.bucket.bounds[position : position + 2]
        first, last = max(among.start, start), min(among.stop, stop)
        return slice(first - start, last - start) if first < last else slice(0, 0)

    def tell(self) -> bytes:
        """What the other ranks need to know."""
        count = self.bucket.state.count if self.strategy.stateful else None
        replica = b"" if self.snapshot is None else self.snapshot.digest
        return report.write(self.present, count, self.samples, replica)

    def compare(self, payloads: Sequence[bytes], transport: Transport) -> None:
        """Compare the ranks' replicas, if any rank has brought a digest of its own.

        Raises:
            MismatchError: on all ranks; they differ.
        """
        digests = report.read_replicas(payloads, self._size)
        if any(digests):
            replicas.compare(digests, self.snapshot, transport)

    def learn(self, payloads: Sequence[bytes], rank: int) -> Report:
        """Take note of what the ranks tell, by rank.

        Raises:
            GradientError: as `report.read`.
        """
        told = report.read(payloads, self._size, self._members)
        self.kinds = told.kinds
        self.weight = 1.0 if told.weights is None else float(told.weights[rank])
        self.bucket.count, self.bucket.absent = told.exchanges, told.absent
        return told

    def follow(self) -> None:
        """Order writes into slots after the last exchange; on the host its end does that."""

    def fill(self) -> None:
        """Write zeros for the gradients that have not come, or not as dense ones."""
        if self.has_gaps:
            for position, kind in enumerate(self.present):
                if kind != DENSE:
                    self.bucket.send_slot(position)[...] = 0

    def operation(self, name: str, signature: Signature) -> Operation:
        """Make the operation that exchanges the bucket as it is now."""
        return BucketExchange(name, signature, self)

    def wait(self) -> None:
        """Wait for the exchange, if it is on its way."""
        if self.handle is not None:
            self.handle.wait()

    def settle(self) -> None:
        """Do so, whatever becomes of it: then its slots may be written again."""
        with contextlib.suppress(HorovodInternalError):
            self.wait()


class BucketExchange(Operation):
    """The exchange of one bucket; its payload says which gradients are there.

    Args:
        name: of the operation.
        signature: of the whole plan.
        step: the bucket; what has not come counts as zeros.
    """

    def __init__(self, name: str, signature: Signature, step: BucketStep) -> None:
        super().__init__(name, signature, payload=step.tell())
        self._step = step
        self.nbytes = step.bucket.send.nbytes

    stands_in = True

    @property
    def about(self) -> str:
        """Return the names of the first parameters in the bucket."""
        return self._step.title

    def stand_in(self) -> Callable[[], Operation]:
        """What makes the exchange of a bucket without any gradient."""
        bucket = self._step.bucket
        described = bucket.parameters, bucket.reduction
        return partial(NoGradients, self.name, self.signature, self._step.strategy, *described)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Exchange the bucket, unless no rank has any of its gradients as a dense one.

        Raises:
            GradientError: on all ranks alike, see `exchange_bucket` and `report.read`.
            MismatchError: likewise, see `replicas.compare`.
        """
        self._step.compare(payloads, transport)
        told = self._step.learn(payloads, transport.rank)
        bucket, strategy = self._step.bucket, self._step.strategy
        if bucket.send.size and not told.is_empty:
            if self._step.renews:
                bucket.renew()
            with timeline.span(self.lane, timeline.EXCHANGE):
                exchange_bucket(strategy, bucket, transport, self._step.weight)
            if self._step.renews:
                transport.release(bucket.result)  # its owner's now
            if strategy.stateful:
                bucket.state.count = told.exchanges + 1
                bucket.state.belong(transport.rank, transport.size)


class NoGradients(Operation):
    """The exchange of a bucket on a rank that has joined.

    Args:
        name: of the operation.
        signature: of the whole plan.
        strategy: how the bucket travels.
        parameters: of the bucket.
        reduction: sum or average.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        strategy: Strategy,
        parameters: Sequence[Parameter],
        reduction: Reduction,
    ) -> None:
        super().__init__(name, signature)
        self._strategy = strategy
        self._parameters = parameters
        self._reduction = reduction

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Exchange zeros, unless no rank has any of the gradients as a dense one.

        Raises:
            GradientError, MismatchError: as on the other ranks.
        """
        digests = report.read_replicas(payloads, len(self._parameters))
        if any(digests):
            replicas.compare(digests, None, transport)
        told = report.read(payloads, len(self._parameters), transport.members)
        bucket = Bucket(self._parameters, self._reduction, transport.empty)
        if bucket.send.size and not told.is_empty:
            bucket.send[...] = 0
            bucket.count, bucket.absent = told.exchanges, told.absent
            exchange_bucket(self._strategy, bucket, transport)
