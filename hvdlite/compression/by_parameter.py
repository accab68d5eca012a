"""One strategy for some parameters, another one for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdlite.compression.bucket import Bucket
from hvdlite.compression.parameter import Parameter
from hvdlite.compression.strategy import Strategy
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport

Rule = Callable[[Parameter], Strategy]


@dataclass(frozen=True, repr=False)
class ByParameter(Strategy):
    """Let a rule say by which strategy each parameter's gradient travels.

    Each bucket has parameters of one strategy. An example, which leaves biases as they are and
    sends one percent of everything else::

        def rule(parameter):
            return Compression.none if len(parameter.shape) < 2 else TopK(0.01)

        compression = ErrorFeedback(ByParameter(rule, [Compression.none, TopK(0.01)]))

    Args:
        rule: gets a `Parameter` (its name, shape, dtype, size), and returns one of ``among``. It
            must return the same on all ranks, which they compare.
        among: the strategies that there are to choose from.

    Raises:
        ValueError: there is none to choose from.
    """

    rule: Rule
    among: Sequence[Strategy]

    def __post_init__(self) -> None:
        object.__setattr__(self, "among", tuple(self.among))
        if not self.among:
            raise ValueError("among is empty; list the strategies that the rule may return")

    @property
    def ops(self) -> tuple[ReduceOp, ...]:  # type: ignore[override]
        """What all of them compute."""
        return tuple(op for op in ReduceOp if all(op in each.ops for each in self.among))

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """If any of them is."""
        return any(each.stateful for each in self.among)

    @property
    def tells_unsent(self) -> bool:  # type: ignore[override]
        """If all of them do."""
        return all(each.tells_unsent for each in self.among)

    @property
    def takes_weights(self) -> bool:  # type: ignore[override]
        """If all of them do."""
        return all(each.takes_weights for each in self.among)

    def choose(self, parameter: Parameter) -> Strategy:
        """Ask the rule.

        Raises:
            ValueError: it returns something else than one of the strategies.
        """
        chosen = self.rule(parameter)
        if chosen not in self.among:
            raise ValueError(
                f"the rule of ByParameter returns {chosen!r} for {parameter.name!r}, which is none "
                f"of the strategies that it was given: {', '.join(map(repr, self.among))}"
            )
        return chosen.choose(parameter)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Never called: each bucket has the strategy of its parameters."""
        raise NotImplementedError("ByParameter chooses; it does not exchange")

    def __repr__(self) -> str:
        return f"ByParameter({', '.join(map(repr, self.among))})"
