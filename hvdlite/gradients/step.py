"""One bucket in the current step, and the operation that exchanges it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite import timeline
from hvdlite.engine import Handle, Operation
from hvdlite.engine.operation import Signature
from hvdlite.exchange import Bucket, Parameter, Reduction, Strategy
from hvdlite.transport import Transport

# What a bucket's payload says of a gradient; a sparse one is DENSE and the number of its sparse
# axes, which a rank that has no gradient has to know.
ABSENT, DENSE = 0, 1


class BucketStep:
    """A bucket, and how far it has come in the current step.

    Attributes:
        bucket: the arrays.
        absent: how many gradients are not here yet.
        kinds: after the exchange, numbers of shape (ranks, parameters): 0 where a rank had no
            gradient, 1 for a dense one, and for a sparse one 1 more than its sparse axes.
        handle: of the exchange, once it is on its way.
        renews: whether each exchange writes to a result array of its own.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._size = len(bucket.parameters)
        self._all_dense = bytes([DENSE]) * self._size
        self.kinds: Any = None
        self.renews = True
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self.present = bytearray(self._size)
        self.absent = self._size
        self.handle: Handle | None = None

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

    def learn(self, payloads: Sequence[bytes]) -> None:
        """Take note of which gradients the ranks have, by rank.

        A rank that has joined, whose payload is empty, counts as one that has what any has.
        """
        here = np.frombuffer(b"".join(payloads), np.uint8).reshape(-1, self._size)
        anywhere = here.max(axis=0)
        rows = iter(here)
        self.kinds = np.array([next(rows) if payload else anywhere for payload in payloads])

    def fill(self) -> None:
        """Write zeros for the gradients that have not come, or not as dense ones."""
        if self.has_gaps:
            for position, kind in enumerate(self.present):
                if kind != DENSE:
                    self.bucket.send_slot(position)[...] = 0

    def operation(self, name: str, signature: Signature, strategy: Strategy) -> Operation:
        """Make the operation that exchanges the bucket as it is now."""
        return BucketExchange(name, signature, strategy, self)

    def wait(self) -> None:
        """Wait for the exchange, if it is on its way."""
        if self.handle is not None:
            self.handle.wait()


class BucketExchange(Operation):
    """The exchange of one bucket; its payload says which gradients are there.

    Args:
        name: of the operation.
        signature: of the whole plan.
        strategy: how the bucket travels.
        step: the bucket; what has not come counts as zeros.
    """

    def __init__(
        self, name: str, signature: Signature, strategy: Strategy, step: BucketStep
    ) -> None:
        super().__init__(name, signature, payload=bytes(step.present))
        self._strategy = strategy
        self._step = step
        self.nbytes = step.bucket.send.nbytes

    stands_in = True

    def stand_in(self) -> Callable[[], Operation]:
        """What makes the exchange of a bucket without any gradient."""
        bucket = self._step.bucket
        described = bucket.parameters, bucket.reduction
        return partial(NoGradients, self.name, self.signature, self._strategy, *described)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Exchange the bucket, unless no rank has any of its gradients as a dense one."""
        self._step.learn(payloads)
        bucket = self._step.bucket
        if bucket.send.size and (self._step.kinds == DENSE).any():
            if self._step.renews:
                bucket.renew()
            with timeline.span(self.lane, timeline.EXCHANGE):
                self._strategy.exchange(bucket, transport)


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
        """Exchange zeros, unless no rank has any of the gradients as a dense one."""
        bucket = Bucket(self._parameters, self._reduction, transport.empty)
        if bucket.send.size and any(DENSE in payload for payload in payloads):
            bucket.send[...] = 0
            self._strategy.exchange(bucket, transport)
