"""What Keras optimizers need of PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hvdlite import runtime
from hvdlite._keras.options import LABEL, Options
from hvdlite.engine import Engine
from hvdlite.exchange import Parameter, StrategyState
from hvdlite.gradients import GradientBuckets, describe_sources
from hvdlite.torch.tensors import dtype_of, to_array, to_tensor_like


class TorchBackend:
    """Gradients as PyTorch has them.

    Args:
        options: how they are exchanged.
        state: what the compression remembers.
    """

    def __init__(self, options: Options, state: StrategyState) -> None:
        self._options = options
        self._state = state
        # By engine: a new world begins with none, and the old one's go with it.
        self._exchanges: WeakKeyDictionary[Engine, dict[tuple[Parameter, ...], GradientBuckets]] = (
            WeakKeyDictionary()
        )

    @torch.compiler.disable
    @torch.no_grad()
    def reduce(
        self, gradients: Sequence[torch.Tensor | None], variables: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Return the gradients reduced over all ranks; None where no rank has one."""
        exchange = self._connect(_describe(variables))
        if not exchange.plan:
            exchange.compare()
        for index, members in enumerate(exchange.plan):
            own = {number: gradients[number] for number in members}
            exchange.start_bucket(
                index, {number: to_array(as_dense(g)) for number, g in own.items() if g is not None}
            )
        # All are on their way before the first is waited for.
        reduced: list[torch.Tensor | None] = [None] * len(gradients)
        for index, members in enumerate(exchange.plan):
            anywhere = exchange.finish_bucket(index).any(axis=0)
            for number, has in zip(members, anywhere, strict=True):
                if has:
                    variable = variables[number].value
                    reduced[number] = to_tensor_like(exchange.result_slot(number), variable)
        return reduced

    def divide_by_size(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient, or None, divided by the number of ranks."""
        return (
            None if gradient is None else gradient / runtime.engine(self._options.process_set).size
        )

    def _connect(self, parameters: tuple[Parameter, ...]) -> GradientBuckets:
        """The exchange of these parameters' gradients in the world as it is now."""
        engine = runtime.engine(self._options.process_set)
        exchanges = self._exchanges.setdefault(engine, {})
        if parameters not in exchanges:
            exchanges[parameters] = GradientBuckets(
                engine,
                LABEL,
                parameters,
                self._options.strategy,
                self._options.reduction,
                also=describe_sources(parameters),
                state=self._state,
            )
        return exchanges[parameters]


def _describe(variables: Sequence[Any]) -> tuple[Parameter, ...]:
    seen: Counter[str] = Counter()
    parameters = []
    for variable in variables:
        name = variable.path
        unique = f"{name}#{seen[name]}" if seen[name] else name
        seen[name] += 1
        tensor = variable.value
        parameters.append(Parameter(unique, tuple(tensor.shape), dtype_of(tensor.dtype)))
    return tuple(parameters)


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a tensor of the variable's shape."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
