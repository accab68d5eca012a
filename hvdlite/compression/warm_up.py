"""No compression at first."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.arguments import check_count
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.strategy import DENSE, Strategy
from hvdlite.compression.wrapper import Wrapper, check_inner
from hvdlite.transport import Transport


@dataclass(frozen=True, repr=False)
class WarmUp(Wrapper):
    """Exchange gradients as they are in the first steps, when they are largest and change most.

    Args:
        inner: the strategy for all later steps.
        steps: how many steps are the first.

    Raises:
        ValueError: ``steps`` is no whole number from 0 on.
        TypeError: ``inner`` is no strategy.
    """

    inner: Strategy
    steps: int

    stateful = True

    def __post_init__(self) -> None:
        check_inner("WarmUp", self.inner)
        check_count("steps", self.steps, 0)

    @property
    def tells_unsent(self) -> bool:  # type: ignore[override]
        """If the inner strategy does."""
        return self.inner.tells_unsent

    def around(self, inner: Strategy) -> Strategy:
        """Warm up for ``inner``."""
        return inner if inner == DENSE else WarmUp(inner, self.steps)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Exchange by one or the other."""
        strategy = DENSE if bucket.count < self.steps else self.inner
        strategy.exchange(bucket, transport)
