"""Elastic training with PyTorch: ``hvd.elastic``."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdlite import collectives
from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.elastic.state import PositionHandler, StatefulHandler, StateHandler, handlers
from hvdlite.torch.sampler import ElasticSampler, ShardSampler
from hvdlite.torch.state import (
    broadcast_parameters,
    has_extra_state,
    loading_in_place,
    send_optimizer_state,
)
from hvdlite.torch.wrapping import Distributed

__all__ = ["ElasticSampler", "HostUpdate", "ObjectState", "State", "TorchState", "run"]


class ModelStateHandler(StatefulHandler):
    """Handles a module."""

    def restore(self) -> None:
        super().restore()
        for parameter in self.value.parameters():  # those of an abandoned step
            parameter.grad = None

    def sync(self) -> None:
        if has_extra_state(self.value):
            super().sync()
        else:
            broadcast_parameters(self.value, 0)


class OptimizerStateHandler(StatefulHandler):
    """Handles an optimizer, distributed or not.

    Residuals of a compression stay each rank's own: one that joins begins with none.
    """

    def apply(self, captured: Any, is_own: bool = False) -> None:
        state = copy.deepcopy(captured)
        with loading_in_place(self.value, exactly=True):
            if isinstance(self.value, Distributed):
                self.value._load(state, is_own)
            else:
                self.value.load_state_dict(state)

    def restore(self) -> None:
        super().restore()
        # Not its own, which waits while gradients are being exchanged.
        torch.optim.Optimizer.zero_grad(self.value)

    def sync(self) -> None:
        value = self.value
        is_distributed = isinstance(value, Distributed)
        send_optimizer_state(
            value, value._common_state_dict if is_distributed else value.state_dict, 0
        )

    def gather(self) -> None:
        if isinstance(self.value, Distributed):
            self.value.consolidate_exchange_state()

    def reset(self) -> None:
        if isinstance(self.value, Distributed):
            self.value._restart()


class SamplerStateHandler(StatefulHandler):
    """Handles an `ElasticSampler`, and merges the samples that the ranks have processed."""

    def capture(self) -> Any:
        return self.value.state_dict()  # a copy, made faster than by deepcopy

    def apply(self, captured: Any, is_own: bool = False) -> None:
        self.value.load_state_dict(captured)

    def sync(self) -> None:
        self.merge()

    def merge(self) -> None:
        states = collectives.allgather_object(self.value.state_dict(), "elastic.ElasticSampler")
        epoch = states[0]["epoch"]
        processed = [state["processed_indices"] for state in states if state["epoch"] == epoch]
        self.value.load_state_dict({"epoch": epoch, "processed_indices": set().union(*processed)})

    def reset(self) -> None:
        self.value.reset()


handlers += [(ElasticSampler, SamplerStateHandler), (ShardSampler, PositionHandler)]
_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    *handlers,
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the pairs of a type and its handler class, in order of precedence."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry for future `TorchState` objects."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a model, its optimizer, and other objects of the training.

    For objects with ``state_dict()`` and ``load_state_dict()`` (models, optimizers, learning rate
    schedulers, gradient scalers, `ElasticSampler`), it saves a copy of the state in memory; other
    objects are copied themselves. All are attributes::

        state = TorchState(model, optimizer, scheduler=scheduler, epoch=0, batch=0)
        state.model, state.epoch

    A `StateHandler` may take the place of an object; the attribute is its ``value``.
    `set_handler_registry` adds handlers for further types.

    Include the `DistributedOptimizer`: after a failure in the middle of a step it has to discard
    that step's gradients. Gradients are not saved, so commit between steps, and not while they
    accumulate.

    Args:
        model: the model, if any.
        optimizer: the optimizer, wrapped or not, if any.
        **kwargs: other attributes and their initial values.

    Raises:
        ValueError: the class has an attribute or a method of that name.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        # In the order given, which is the same on all ranks.
        super().__init__(**{name: _handled(value) for name, value in given.items()})


def _handled(value: Any) -> Any:
    """Return the handler of an object, or the object itself, which is copied."""
    found = next((handler for kind, handler in _registry if isinstance(value, kind)), None)
    if found is None and not isinstance(value, type):  # which has methods, too, but no state
        methods = (getattr(value, each, None) for each in ("state_dict", "load_state_dict"))
        found = StatefulHandler if all(map(callable, methods)) else None
    return value if found is None else found(value)
