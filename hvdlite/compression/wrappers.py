"""Strategies that build on others: error feedback, warm-up, and a choice for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdlite.base.arguments import check_count
from hvdlite.base.reduction import ReduceOp
from hvdlite.compression.bucket import Bucket, Parameter
from hvdlite.compression.strategy import DENSE, Strategy
from hvdlite.transport import Transport

_RESIDUAL = "residual"


@dataclass(frozen=True, repr=False)
class Wrapper(Strategy):
    """Base of strategies that change the exchange of another one, ``inner``."""

    inner: Strategy

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Strategy):
            kind, inner = type(self).__name__, self.inner
            found = inner.__name__ if isinstance(inner, type) else repr(inner)
            raise TypeError(
                f"{kind}({found}): {found} is no strategy; give one with its settings, as in "
                f"{kind}(hvd.Compression.TopK(0.01), ...)"
            )
        # Adasum is not linear.
        ops = tuple(op for op in self.inner.ops if op is not ReduceOp.ADASUM)
        object.__setattr__(self, "ops", ops)

    def choose(self, parameter: Parameter) -> Strategy:
        chosen = self.inner.choose(parameter)
        if chosen is self.inner:
            return self
        return chosen if chosen.is_identity else replace(self, inner=chosen)


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Wrapper):
    """Remember the part of a gradient that a strategy does not send, and add it to the next one.

    So nothing is lost: the sum of all results and of the remaining residuals is the sum of all
    gradients, to rounding. Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019,
    arXiv:1901.09847, who show that it makes sign compression converge.

    Residuals are always finite: others would spoil all later results. So if a strategy sends
    infinities, or sums overflow, only that step's result is not finite; infinities for which
    `TopK` has no room are dropped.

    A rank that has no gradient of a parameter sends its residual of earlier ones. If no rank has
    a gradient of a parameter, its residuals stay unchanged.

    If a gradient is refused (it is not a number, say), the residuals of its bucket stay unchanged.
    Buckets exchanged earlier in that step have already sent their residuals, which are lost
    together with the gradients of the skipped step. To lose nothing, return
    to a checkpoint, or to a commit of ``hvd.elastic``. If a GradScaler changes the scale of the
    loss, residuals keep the old scale.

    Args:
        inner: the strategy, which must report what it has not sent.

    Raises:
        ValueError: it does not.
        TypeError: it is not a strategy.
    """

    stateful = True
    tells_unsent = False  # it keeps that itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.tells_unsent:
            raise ValueError(
                f"ErrorFeedback({self.inner!r}): the inner strategy does not tell what it leaves "
                "out, or takes care of that itself; use it alone"
            )

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        residual = bucket.state.flat(_RESIDUAL, bucket.send.dtype)
        kept = {position: bucket.slot(residual, position).copy() for position in bucket.absent}
        # Not in place: if the exchange fails, the residual is unchanged.
        np.add(bucket.send, residual, out=bucket.result)
        for position in kept:
            bucket.result_slot(position)[...] = 0
        self.inner.exchange(bucket.derive(bucket.result, bucket.result, residual), transport)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(np.add.reduce(residual)):
                residual[~np.isfinite(residual)] = 0
        for position, earlier in kept.items():
            bucket.slot(residual, position)[...] = earlier


@dataclass(frozen=True, repr=False)
class WarmUp(Wrapper):
    """Send gradients unchanged in the first steps, when they are largest and change most.

    Args:
        inner: the strategy for all later steps.
        steps: the number of first steps.

    Raises:
        ValueError: ``steps`` is not an integer of 0 or more.
        TypeError: ``inner`` is not a strategy.
    """

    steps: int

    stateful = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("steps", self.steps, 0)
        object.__setattr__(self, "tells_unsent", self.inner.tells_unsent)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        strategy = DENSE if bucket.count < self.steps else self.inner
        strategy.exchange(bucket, transport)


@dataclass(frozen=True, repr=False)
class ByParameter(Strategy):
    """Let a rule choose the strategy for each parameter's gradient.

    Each bucket has parameters of one strategy. The following sends biases unchanged, and one
    percent of everything else::

        def rule(parameter):
            return Compression.none if len(parameter.shape) < 2 else TopK(0.01)

        compression = ErrorFeedback(ByParameter(rule, [Compression.none, TopK(0.01)]))

    Args:
        rule: gets a `Parameter` (its name, shape, dtype, size), and returns one of ``among``. It
            must return the same on all ranks, which they compare.
        among: the strategies to choose from.

    Raises:
        ValueError: ``among`` is empty.
    """

    rule: Callable[[Parameter], Strategy]
    among: Sequence[Strategy]

    def __post_init__(self) -> None:
        among = tuple(self.among)
        if not among:
            raise ValueError("among is empty; list the strategies that the rule may return")
        object.__setattr__(self, "among", among)
        ops = tuple(op for op in ReduceOp if all(op in each.ops for each in among))
        object.__setattr__(self, "ops", ops)
        object.__setattr__(self, "stateful", any(each.stateful for each in among))
        object.__setattr__(self, "tells_unsent", all(each.tells_unsent for each in among))
        object.__setattr__(self, "takes_weights", all(each.takes_weights for each in among))

    def choose(self, parameter: Parameter) -> Strategy:
        chosen = self.rule(parameter)
        if chosen not in self.among:
            raise ValueError(
                f"the rule of ByParameter returns {chosen!r} for {parameter.name!r}, which is none "
                f"of the strategies that it was given: {', '.join(map(repr, self.among))}"
            )
        return chosen.choose(parameter)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Raise: each bucket has the strategy of its parameters instead."""
        raise NotImplementedError("ByParameter chooses; it does not exchange")

    def __repr__(self) -> str:
        return f"ByParameter({', '.join(map(repr, self.among))})"
