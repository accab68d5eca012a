"""The exchange of the gradients of named sources, as tapes and Keras' optimizers have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.engine import Engine, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.plan import describe_sources
from hvdlite.gradients.replicas import ReplicaCheck

# A program that makes one model after the other must not keep the buckets of all of them.
_MOST_EXCHANGES = 32


@dataclass(frozen=True)
class SourceExchange:
    """Everything that must be equal on all ranks for their gradients to be exchanged.

    Attributes:
        label: Common to all exchanges of a kind, so that ranks whose exchanges differ meet under
            it and learn the difference.
        parameters: Of all sources.
        state: The state of the compression for the sources; None: it has none.
        sparse: The positions in ``parameters`` whose gradients are gathered.
    """

    label: str
    parameters: tuple[Parameter, ...]
    strategy: Strategy
    reduction: Reduction
    process_set: ProcessSet = field(compare=False)  # it chooses the engine
    state: StrategyState | None = None  # each has an identity, and so an exchange, of its own
    sparse: frozenset[int] = frozenset()

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """Return the positions in ``parameters`` of those that travel in buckets."""
        return tuple(n for n in range(len(self.parameters)) if n not in self.sparse)

    @cached_property
    def in_buckets(self) -> list[Parameter]:
        """Return the parameters that travel in buckets."""
        return [self.parameters[position] for position in self.dense]

    def connect(self) -> GradientBuckets:
        """Return the buckets in the current world; they are made once."""
        engine = runtime.engine(self.process_set)
        exchanges = _exchanges.setdefault(engine, OrderedDict())
        if self not in exchanges:
            exchanges[self] = GradientBuckets(
                engine,
                self.label,
                self.in_buckets,
                self.strategy,
                self.reduction,
                also=describe_sources(self.parameters, self.sparse),
                state=self.state,
            )
            if len(exchanges) > _MOST_EXCHANGES:
                exchanges.popitem(last=False)
        exchanges.move_to_end(self)
        return exchanges[self]

    def run(
        self,
        find: Callable[[int], Any],
        samples: int | None,
        check: ReplicaCheck | None,
        leaves_out: bool,
    ) -> list[Any]:
        """Exchange the gradients in buckets now; arguments as for `GradientBuckets.exchange`.

        Returns:
            The average for each of ``in_buckets``; None where no rank has a gradient.
        """
        buckets = self.connect()
        if not buckets.plan:
            buckets.compare(check)
        found = buckets.exchange(find, samples, check, leaves_out)
        buckets.count_step()
        return [buckets.result_slot(n) if has else None for n, has in enumerate(found)]

    @cached_property
    def _hash(self) -> int:
        fields = self.label, self.parameters, self.sparse, self.strategy, self.reduction
        return hash((*fields, self.state))

    def __hash__(self) -> int:
        # Looked up for every bucket of every step, and the parameters may be many.
        return self._hash


# By engine: a new world begins with none, and the old one's go with it.
_exchanges: WeakKeyDictionary[Engine, OrderedDict[SourceExchange, GradientBuckets]] = (
    WeakKeyDictionary()
)
