"""Several ranks of one process that exchange a bucket, step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.compression import Bucket, Parameter, Reduction, StrategyState, exchange_bucket
from hvdlite.compression.bucket import BucketState
from hvdlite.errors import GradientError
from tests.simulation import Simulation, on_all_ranks

SIZES = [1, 2, 3, 4]


class Ranks:
    """The ranks, and the state of their strategies.

    Args:
        size: the number of ranks.
        strategy: the same on all.
        reduction: the same on all.

    Attributes:
        states: of each rank's strategy.
    """

    def __init__(self, size: int, strategy: Any, reduction: Reduction | None = None) -> None:
        self.size = size
        self.strategy = strategy
        self.reduction = reduction or Reduction()
        self.states = [StrategyState() for _ in range(size)]
        self.simulation = Simulation(size)

    def step(
        self, gradients: Sequence[Mapping[str, Any]], absent: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Exchange gradients; return the results, which must be equal on all ranks.

        Gradients of one strategy share a bucket.

        Args:
            gradients: of each rank, by name; in the order within their bucket.
            absent: names of those that no rank has, and that are zeros.
        """

        results = on_all_ranks(
            lambda rank: self._step(rank, gradients[rank], absent), range(self.size)
        )
        for other in results[1:]:
            for first, second in zip(results[0], other, strict=True):
                assert first.tobytes() == second.tobytes(), "ranks have different results"
        return dict(zip(gradients[0], results[0], strict=True))

    def refusals(
        self, gradients: Sequence[Mapping[str, Any]], kind: type[Exception] = GradientError
    ) -> list[str]:
        """Return the message with which each rank refuses gradients."""

        def on_rank(rank: int) -> str:
            with pytest.raises(kind) as caught:
                self._step(rank, gradients[rank])
            return str(caught.value)

        return on_all_ranks(on_rank, range(self.size))

    def record(self, collective: str) -> list[list[Any]]:
        """Return a list for each rank, to which what it gives to a collective will be appended."""
        given: list[list[Any]] = [[] for _ in range(self.size)]
        for own, transport in zip(given, self.simulation.transports, strict=True):
            call = getattr(transport, collective)

            def recorded(first: Any, *rest: Any, own: Any = own, call: Any = call) -> Any:
                own.append(first)
                return call(first, *rest)

            setattr(transport, collective, recorded)
        return given

    def _step(self, rank: int, own: Mapping[str, Any], absent: Sequence[str] = ()) -> list[Any]:
        """Exchange the gradients of one rank, bucket by bucket."""
        parameters = [Parameter(name, each.shape, each.dtype) for name, each in own.items()]
        together: dict[Any, list[Parameter]] = {}
        for parameter in parameters:
            together.setdefault(self.strategy.choose(parameter), []).append(parameter)
        found: dict[str, Any] = {}
        for strategy, members in together.items():
            found.update(self._exchange(rank, strategy, members, own, absent))
        return [found[name] for name in own]

    def _exchange(
        self,
        rank: int,
        strategy: Any,
        parameters: Sequence[Parameter],
        gradients: Mapping[str, Any],
        absent: Sequence[str],
    ) -> dict[str, Any]:
        """Exchange one bucket on one rank."""
        bucket = Bucket(parameters, self.reduction, state=self.states[rank])
        names = [parameter.name for parameter in parameters]
        for position, name in enumerate(names):
            bucket.send_slot(position)[...] = gradients[name]
        bucket.count = max(BucketState(parameters, each).count for each in self.states)
        bucket.absent = [names.index(name) for name in absent if name in names]
        before = bucket.send.copy()
        with np.errstate(all="ignore"):
            exchange_bucket(strategy, bucket, self.simulation.transports[rank])
        assert bucket.send.tobytes() == before.tobytes(), "the gradients were changed"
        if strategy.stateful:
            bucket.state.count = bucket.count + 1
        return {name: bucket.result_slot(position).copy() for position, name in enumerate(names)}

    def residual(self, name: str, key: str = "residual") -> Any:
        """Return the sum of all ranks' residuals, in float64."""
        entries = [state.state_dict().get(name, {}) for state in self.states]
        return sum(np.asarray(entry.get(key, 0.0), np.float64) for entry in entries)


def gradients_of(
    size: int, shapes: Mapping[str, tuple[int, ...]], step: int = 0, dtype: Any = np.float32
) -> list[dict[str, Any]]:
    """Return normally distributed gradients for all ranks, with a magnitude for each name."""
    return [
        {
            name: np.asarray(
                np.random.default_rng([step, rank, number]).standard_normal(shape)
                * 10.0 ** (number % 3 - 1)
            ).astype(dtype)
            for number, (name, shape) in enumerate(shapes.items())
        }
        for rank in range(size)
    ]
