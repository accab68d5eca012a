"""Deep Gradient Compression: the greatest gradients, with momentum in what is left."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite import float16
from hvdlite.arguments import check_count, check_momentum, check_positive, check_ratio
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.messages import find_not_finite
from hvdlite.compression.sparse import (
    Entries,
    greatest_of_each,
    no_entries,
    part_of,
)
from hvdlite.compression.strategy import Strategy
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport

_VELOCITY, _ACCUMULATED = "velocity", "accumulated"


@dataclass(frozen=True, repr=False)
class DeepGradientCompression(Strategy):
    """Accumulate the steps that momentum makes of gradients, and send the greatest of each tensor.

    Lin et al. 2018, arXiv:1712.01887. Each rank has a velocity u and what it has not sent yet, v:
    ``u = momentum * u + gradient; v = v + u``; what it sends of v becomes 0 in v and, with
    masking, in u. So what comes late comes with the momentum that it would have had.

    Momentum is applied here: the optimizer must have none of its own, be it SGD with
    ``momentum=0``. What is not sent is kept here, too: `ErrorFeedback` refuses it.

    Infinities are refused, as is what is not a number: they would stay in the velocity.

    Args:
        ratio: how much of each tensor is sent, above 0 and at most 1; rounded up, so at least one
            entry.
        momentum: from 0 to below 1.
        clip_norm: the largest norm of the reduced gradient for which gradients are not clipped;
            above 0. Each rank clips its own contribution to the result (its gradient, for an
            average divided by the number of ranks n) to the norm ``clip_norm / sqrt(n)``, which
            is what independent gradients amount to. The norm is that of a bucket, and not of all
            gradients, which are not all there yet. None: nothing is clipped.
        warm_up_steps: how many steps it takes from ``warm_up_ratio`` to ``ratio``, each sending
            the same part less than the one before.
        warm_up_ratio: how much of each tensor is sent in the first step of the warm-up; at least
            ``ratio``.
        masking: whether the velocity of what is sent becomes 0.

    Raises:
        ValueError: an argument is out of range.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    warm_up_steps: int = 0
    warm_up_ratio: float = 0.25
    masking: bool = True

    stateful = True

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_ratio("warm_up_ratio", self.warm_up_ratio)
        check_momentum("momentum", self.momentum)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        check_count("warm_up_steps", self.warm_up_steps, 0)
        if self.warm_up_steps and self.warm_up_ratio < self.ratio:
            raise ValueError(
                f"warm_up_ratio={self.warm_up_ratio!r} is below ratio={self.ratio!r}; the first "
                "steps are to send more, not less"
            )

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Accumulate, send, and remember, which is done last: the exchange may fail."""
        send = bucket.send
        velocity = bucket.state.flat(_VELOCITY, send.dtype)
        accumulated = bucket.state.flat(_ACCUMULATED, send.dtype)
        factor = self._clipping(bucket, transport.size)
        total = np.zeros_like(send)
        for piece in _present(bucket):
            step = self._velocity(velocity[piece], send[piece], factor)
            np.add(accumulated[piece], step, out=total[piece])
        bad = find_not_finite(bucket, total)
        indices = self._select(bucket, total) if bad < 0 else no_entries()
        entries = Entries(bucket, transport, total, indices, bad)
        for piece in _present(bucket):
            # Once more, which takes less than the memory to remember it.
            velocity[piece] = self._velocity(velocity[piece], send[piece], factor)
            accumulated[piece] = total[piece]
        accumulated[indices] = 0
        if self.masking:
            velocity[indices] = 0
        entries.add_up()

    def _velocity(self, velocity: Any, gradient: Any, factor: float) -> Any:
        moved = velocity * velocity.dtype.type(self.momentum)
        moved += gradient if factor == 1.0 else gradient * gradient.dtype.type(factor)
        return moved

    def _select(self, bucket: Bucket, total: Any) -> Any:
        ratio = self._ratio(bucket.count)
        counts = [part_of(parameter.size, ratio) for parameter in bucket.parameters]
        return greatest_of_each(bucket, total, counts)

    def _ratio(self, count: int) -> float:
        if count >= self.warm_up_steps:
            return self.ratio
        fall = self.ratio / self.warm_up_ratio
        return self.warm_up_ratio * float(fall ** (count / self.warm_up_steps))

    def _clipping(self, bucket: Bucket, size: int) -> float:
        """What this rank's gradients are multiplied by."""
        if self.clip_norm is None:
            return 1.0
        norm = _norm(bucket.send)
        if bucket.reduction.op is ReduceOp.AVERAGE:
            norm /= size
        # Also where that is not a number, of which there is a better message later.
        return min(1.0, self.clip_norm / math.sqrt(size) / (norm or 1.0))


def _present(bucket: Bucket) -> list[slice]:
    """Pieces of the gradients that some rank has, each small enough for the cache."""
    return [
        slice(start + piece.start, start + piece.stop)
        for position, (start, stop) in enumerate(itertools.pairwise(bucket.bounds))
        if position not in bucket.absent
        for piece in float16.pieces(stop - start)
    ]


def _norm(values: Any) -> float:
    """The Euclidean norm, also where squares are out of range."""
    greatest = float(max(values.max(initial=0), -values.min(initial=0)))
    if not 0 < greatest < np.inf:
        return greatest
    squares = (
        np.add.reduce(np.square(values[piece] / greatest), dtype=np.float64)
        for piece in float16.pieces(values.size)
    )
    return greatest * math.sqrt(sum(squares))
