"""What an exchange of gradients is made for, and the exchanges that there are."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

from hvdlite import runtime
from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.engine import Engine
from hvdlite.gradients import GradientBuckets, describe_sources
from hvdlite.process_sets import ProcessSet

# A program that makes one model after the other must not keep the buckets of all of them.
_MOST_EXCHANGES = 32


@dataclass(frozen=True)
class Layout:
    """Everything that must be alike on all ranks for their gradients to be exchanged.

    Attributes:
        label: one for all layouts of a kind: ranks whose layouts differ meet under it and learn
            in what.
        parameters: of all sources.
        sparse: positions in ``parameters`` whose gradients are gathered.
        strategy: how dense gradients travel.
        reduction: sum or average.
        process_set: the ranks that take part.
        state: what the strategy remembers of the sources; None: nothing.
    """

    label: str
    parameters: tuple[Parameter, ...]
    sparse: frozenset[int]
    strategy: Strategy
    reduction: Reduction
    process_set: ProcessSet = field(compare=False)  # it chooses the engine
    state: StrategyState | None = None  # each has an identity, and so an exchange, of its own

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """Positions in ``parameters`` of those that travel in buckets."""
        return tuple(
            position for position in range(len(self.parameters)) if position not in self.sparse
        )

    def connect(self) -> GradientBuckets:
        """The exchange of the dense gradients in the world as it is now."""
        exchanges = _exchanges.setdefault(runtime.engine(self.process_set), OrderedDict())
        if self not in exchanges:
            exchanges[self] = self._connect()
            if len(exchanges) > _MOST_EXCHANGES:
                exchanges.popitem(last=False)
        exchanges.move_to_end(self)
        return exchanges[self]

    def _connect(self) -> GradientBuckets:
        return GradientBuckets(
            runtime.engine(self.process_set),
            self.label,
            [self.parameters[position] for position in self.dense],
            self.strategy,
            self.reduction,
            also=describe_sources(self.parameters, self.sparse),
            state=self.state,
        )

    @cached_property
    def _hash(self) -> int:
        fields = self.label, self.parameters, self.sparse, self.strategy, self.reduction
        return hash((*fields, self.state))

    def __hash__(self) -> int:
        # Looked up for every bucket of every step, and the parameters may be many.
        return self._hash


# By engine: a new world begins with none, and the old one's go with it.
_exchanges: WeakKeyDictionary[Engine, OrderedDict[Layout, GradientBuckets]] = WeakKeyDictionary()
