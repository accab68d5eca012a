"""Error feedback: what a compression leaves out is sent with a later step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.compression.bucket import Bucket
from hvdlite.compression.strategy import DENSE, Strategy
from hvdlite.compression.wrapper import Wrapper, check_inner
from hvdlite.transport import Transport

_RESIDUAL = "residual"


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Wrapper):
    """Remember what a strategy does not send, and add it to the next step's gradient.

    So nothing is lost: the sum of all results and of the residuals that are left is the sum of
    all gradients, to rounding. Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019,
    arXiv:1901.09847, who show that it makes sign compression converge.

    Nothing is kept that is not finite: it would be in all later results. So where a strategy sends
    infinities, or sums overflow, only that step's result is not finite; infinities that `TopK` has
    no room for are dropped.

    A rank that has no gradient of a parameter sends what it has left of earlier ones. What no rank
    has a gradient of stays as it is.

    Where a gradient is refused (it is not a number, say), the residuals of its bucket stay as they
    were. Buckets that were exchanged before in that step have had their residuals sent, with
    gradients of which no optimizer made a step: these are lost, as those gradients are. To lose
    nothing, return to a checkpoint, or to a commit of ``hvd.elastic``. Where a GradScaler changes
    the scale of the loss, what is left is still of the scale before.

    Args:
        inner: the strategy, which has to tell what it has not sent.

    Raises:
        ValueError: it does not.
        TypeError: it is no strategy.
    """

    inner: Strategy

    stateful = True
    tells_unsent = False  # it keeps that itself

    def __post_init__(self) -> None:
        check_inner("ErrorFeedback", self.inner)
        if not self.inner.tells_unsent:
            raise ValueError(
                f"ErrorFeedback({self.inner!r}): the inner strategy does not tell what it leaves "
                "out, or takes care of that itself; use it alone"
            )

    def around(self, inner: Strategy) -> Strategy:
        """Feed back the errors of ``inner``, if there can be any."""
        return inner if inner == DENSE else ErrorFeedback(inner)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Exchange gradients and residuals together, and remember what is left."""
        residual = bucket.state.flat(_RESIDUAL, bucket.send.dtype)
        kept = {position: bucket.slot(residual, position).copy() for position in bucket.absent}
        # Not in place: should the exchange fail, the residual is what it was.
        np.add(bucket.send, residual, out=bucket.result)
        for position in kept:
            bucket.result_slot(position)[...] = 0
        self.inner.exchange(bucket.derive(bucket.result, bucket.result, residual), transport)
        _forget_overflow(residual)
        for position, earlier in kept.items():
            bucket.slot(residual, position)[...] = earlier


def _forget_overflow(residual: Any) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(np.add.reduce(residual)):
            residual[~np.isfinite(residual)] = 0
