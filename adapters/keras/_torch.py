"""PyTorch below Keras 3: gradients and local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from hvdlite.compression import Parameter
from hvdlite.engine import Engine, runtime
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.keras_exchange import LABEL, Backend, Synchronizer
from hvdlite.gradients.keras_replica import unique
from hvdlite.gradients.metadata import check_weighted, checked_samples
from hvdlite.gradients.plan import describe_sources
from hvdlite.gradients.replicas import ReplicaCheck, weight_label
from hvdlite.torch.device import pin_device
from hvdlite.torch.tensors import CONVERSION, dtype_of, to_array, to_tensor_like

__all__ = ["CONVERSION", "after", "as_dense", "connect", "is_traced", "pin_device", "unconverted"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Rows of variables on a GPU are copied, and waited for, in one of so many exchanges.
_GPU_STRIDE = 16
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
        # A new world has a new engine; the old one's exchanges are freed with it.
        self._exchanges: WeakKeyDictionary[Engine, dict[tuple[Parameter, ...], GradientBuckets]] = (
            WeakKeyDictionary()
        )

    @torch.compiler.disable
    @torch.no_grad()
    def reduce(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        batch_size: Any = None,
    ) -> list[torch.Tensor | None]:
        samples = checked_samples(batch_size)
        if samples is not None:
            check_weighted(self._options.reduction.op)
        parameters = self.describe(variables)
        exchange = self._exchange_of(parameters)
        settings = runtime.engine(self._options.process_set).settings
        leaves_out = self._leaves_out and settings.not_finite == "skip"
        check = self._check_of(parameters, variables) if self._options.replicates else None
        if not exchange.plan:
            exchange.compare(check)

        def gradient(number: int) -> Any:
            own = gradients[number]
            return None if own is None else to_array(as_dense(own))

        found = exchange.exchange(gradient, samples, check, leaves_out)
        exchange.count_step()
        return [
            to_tensor_like(exchange.result_slot(number), variables[number].value) if has else None
            for number, has in enumerate(found)
        ]

    def are_finite(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        return all(each is None or bool(each.isfinite().all()) for each in gradients)

    def divide_by_size(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        return gradient / runtime.engine(self._options.process_set).size

    def describe(self, variables: Sequence[Any]) -> tuple[Parameter, ...]:
        names = unique(variable.path for variable in variables)
        return tuple(
            Parameter(name, tuple(variable.value.shape), dtype_of(variable.value.dtype))
            for name, variable in zip(names, variables, strict=True)
        )

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
                lambda: 1 if all(each.value.is_cpu for each in variables) else _GPU_STRIDE,
            )
        return self._checks[parameters]

    def _exchange_of(self, parameters: tuple[Parameter, ...]) -> GradientBuckets:
        """Return the exchange of these parameters' gradients in the current world."""
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


connect = TorchBackend


def _find(variable: Any) -> torch.Tensor:
    tensor: torch.Tensor = variable.value.detach()
    return tensor


def unconverted(function: _Function) -> _Function:
    """Return a function unchanged; nothing rewrites functions here."""
    return function


def after(gradients: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context without effect: here nothing runs before its turn."""
    return nullcontext()


def is_traced() -> bool:
    """Return whether the caller is being traced into a graph: never."""
    return False


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a tensor with the shape of its variable."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
