"""Strategies around another strategy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvdlite.compression.parameter import Parameter
from hvdlite.compression.strategy import Strategy
from hvdlite.reduction import ReduceOp


class Wrapper(Strategy):
    """A strategy that does something about the exchange of another one, ``inner``."""

    inner: Strategy

    @property
    def ops(self) -> tuple[ReduceOp, ...]:  # type: ignore[override]
        """Of the inner strategy, without Adasum, which is not linear."""
        return tuple(op for op in self.inner.ops if op is not ReduceOp.ADASUM)

    def choose(self, parameter: Parameter) -> Strategy:
        """Wrap what the inner strategy chooses."""
        chosen = self.inner.choose(parameter)
        return self if chosen is self.inner else self.around(chosen)

    @abstractmethod
    def around(self, inner: Strategy) -> Strategy:
        """Return a wrapper of this kind around another strategy, or that strategy alone."""


def check_inner(wrapper: str, inner: Any) -> None:
    """Refuse to wrap what is no strategy.

    Args:
        wrapper: the name of the class that is to wrap it.
        inner: what the user has given.

    Raises:
        TypeError: naming both.
    """
    if not isinstance(inner, Strategy):
        found = inner.__name__ if isinstance(inner, type) else repr(inner)
        raise TypeError(
            f"{wrapper}({found}): {found} is no strategy; give one with its settings, as in "
            f"{wrapper}(hvd.Compression.TopK(0.01), ...)"
        )
