"""PyTorch below Keras 3: gradients and local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hvdlite.base.reduction import Max
from hvdlite.compression import Parameter
from hvdlite.engine import runtime
from hvdlite.gradients.keras_exchange import LABEL, Backend, Synchronizer
from hvdlite.gradients.keras_replica import unique
from hvdlite.gradients.metadata import check_weighted, checked_samples
from hvdlite.gradients.replicas import DEVICE_STRIDE, ReplicaCheck, weight_label
from hvdlite.gradients.sources import exchange_of
from hvdlite.torch.groups import grouped_allreduce
from hvdlite.torch.recipe import pin_device
from hvdlite.torch.tensors import CONVERSION, dtype_of, to_array, to_tensor_like

__all__ = ["CONVERSION", "after", "as_dense", "connect", "is_traced", "pin_device", "unconverted"]

_REMEDY = "model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])"


class TorchBackend(Backend):
    """The exchange of PyTorch's gradients and tensors."""

    owner = "keras.torch"

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._options = synchronizer.options
        self._leaves_out = synchronizer.leaves_out
        self._state = synchronizer.state.state
        self._replica = synchronizer.replica
        self._checks: dict[tuple[Parameter, ...], ReplicaCheck] = {}

    @torch.no_grad()
    def reduce(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        batch_size: Any = None,
    ) -> list[torch.Tensor | None]:
        options = self._options
        samples = checked_samples(batch_size)
        if samples is not None:
            check_weighted(options.reduction.op)
        exchange = exchange_of(
            LABEL,
            self.describe(variables),
            options.strategy,
            options.reduction,
            options.process_set,
            self._state if options.strategy.stateful else None,
        )
        check = self._check_of(exchange.parameters, variables) if options.replicates else None

        def find(number: int) -> Any:
            own = gradients[number]
            return None if own is None else to_array(as_dense(own))

        return [
            None if average is None else to_tensor_like(average, variable.value)
            for average, variable in zip(
                exchange.run(find, samples, check, self._leaves_out), variables, strict=True
            )
        ]

    def are_finite(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        return all(each is None or bool(each.isfinite().all()) for each in gradients)

    def divide_by_size(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / runtime.engine(self._options.process_set).size

    def describe(self, variables: Sequence[Any]) -> tuple[Parameter, ...]:
        names = unique(variable.path for variable in variables)
        return tuple(
            Parameter(name, tuple(variable.value.shape), dtype_of(variable.value.dtype))
            for name, variable in zip(names, variables, strict=True)
        )

    def greatest(self, values: Sequence[torch.Tensor], variables: Sequence[Any]) -> list[Any]:
        name, process_set = f"{LABEL}: {variables[0].path!r}", self._options.process_set
        return grouped_allreduce(values, op=Max, name=name, process_set=process_set)

    def _check_of(
        self, parameters: tuple[Parameter, ...], variables: Sequence[Any]
    ) -> ReplicaCheck:
        """Return the check that compares these variables, and the optimizer, across ranks."""
        if parameters not in self._checks:
            named = list(zip((each.name for each in parameters), variables, strict=True))
            replica = self._replica

            def values() -> list[tuple[str, Callable[[], Any]]]:
                weights = [(weight_label(name), variable) for name, variable in named]
                state = replica.state(named)
                return [(label, partial(_find, each)) for label, each in (*weights, *state)]

            self._checks[parameters] = ReplicaCheck(
                replica.options,
                values,
                _REMEDY,
                lambda: replica.uncompared,
                to_array,
                lambda: 1 if all(each.value.is_cpu for each in variables) else DEVICE_STRIDE,
            )
        return self._checks[parameters]


connect = TorchBackend
unconverted = torch.compiler.disable
after = nullcontext  # here nothing runs before its turn


def _find(variable: Any) -> torch.Tensor:
    tensor: torch.Tensor = variable.value.detach()
    return tensor


def is_traced() -> bool:
    """Return whether the caller is being traced into a graph: never."""
    return False


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a tensor with the shape of its variable."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
