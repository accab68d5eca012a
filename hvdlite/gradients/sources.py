"""The exchange of the gradients of named sources, as tapes and Keras' optimizers have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.engine import Engine, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.plan import describe_sources
from hvdlite.gradients.replicas import ReplicaCheck


@dataclass(eq=False)
class SourceExchange:
    """The exchange of gradients that are described alike on all ranks; made by `exchange_of`.

    Attributes:
        label: Common to all exchanges of a kind, so that ranks whose exchanges differ meet under
            it and learn the difference.
        parameters: Of all sources.
        state: The state of the compression for the sources; None: it has none.
        sparse: The positions in ``parameters`` whose gradients are gathered.
        dense: The positions of those that travel in buckets.
        in_buckets: The parameters of these.
    """

    label: str
    parameters: tuple[Parameter, ...]
    strategy: Strategy
    reduction: Reduction
    process_set: ProcessSet
    state: StrategyState | None = None
    sparse: frozenset[int] = frozenset()
    # A new world begins with none, and the old one's go with its engine.
    _buckets: WeakKeyDictionary[Engine, GradientBuckets] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.dense = [n for n in range(len(self.parameters)) if n not in self.sparse]
        self.in_buckets = [self.parameters[position] for position in self.dense]

    def connect(self) -> GradientBuckets:
        """Return the buckets in the current world; they are made once."""
        engine = runtime.engine(self.process_set)
        if engine not in self._buckets:
            self._buckets[engine] = GradientBuckets(
                engine,
                self.label,
                self.in_buckets,
                self.strategy,
                self.reduction,
                also=describe_sources(self.parameters, self.sparse),
                state=self.state,
            )
        return self._buckets[engine]

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


#: Returns the exchange of a description. A state has an identity, and so an exchange, of its own.
#: A program that makes one model after the other must not keep the buckets of all of them.
exchange_of = lru_cache(maxsize=32)(SourceExchange)
