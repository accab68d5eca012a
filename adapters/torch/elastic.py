"""Elastic training with PyTorch: ``hvd.elastic``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hvdlite import collectives
from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.errors import HorovodInternalError
from hvdlite.recipe.batches import Batches
from hvdlite.torch.sampler import ElasticSampler, ShardSampler
from hvdlite.torch.state import (
    broadcast_parameters,
    has_extra_state,
    loading_in_place,
    send_optimizer_state,
)
from hvdlite.torch.wrapping import Distributed

__all__ = ["ElasticSampler", "HostUpdate", "ObjectState", "State", "TorchState", "run"]


class StateHandler:
    """Base class of handlers, which save, restore and synchronise one object of a `TorchState`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the object's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite the state on all ranks by that of rank 0; collective."""
        raise NotImplementedError

    def merge(self) -> None:
        """Merge the progress of all ranks; collective. By default nothing."""

    def gather(self) -> None:
        """Bring what other ranks have to rank 0; collective. By default do what `merge` does."""
        self.merge()

    def dump(self) -> Any:
        """Return the state, picklable, for a job with another number of ranks."""
        raise HorovodInternalError(
            f"{type(self).__name__} cannot go on with another number of ranks, since it has no "
            "dump() and load(dump); define them"
        )

    def load(self, dump: Any) -> None:
        """Take on a state that `dump` has returned in another process."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world; by default nothing."""

    def set_value(self, value: Any) -> None:
        """Replace the object, and save its state."""
        self.value = value
        self.save()


class StatefulHandler(StateHandler):
    """Handles objects with ``load_state_dict()`` and a ``state_dict()`` that pickle accepts."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._kept = copy.deepcopy(self.value.state_dict())

    def dump(self) -> Any:
        return self.value.state_dict()

    def load(self, dump: Any) -> None:
        self.value.load_state_dict(dump)

    def restore(self) -> None:
        # Some objects keep the tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self._kept))

    def sync(self) -> None:
        name = f"elastic.{type(self.value).__name__}"
        self.value.load_state_dict(collectives.broadcast_object(self.value.state_dict(), 0, name))


class ModelStateHandler(StatefulHandler):
    """Handles a module."""

    def restore(self) -> None:
        super().restore()
        for parameter in self.value.parameters():
            parameter.grad = None  # of an abandoned step

    def sync(self) -> None:
        if has_extra_state(self.value):
            super().sync()
        else:
            broadcast_parameters(self.value, 0)


class OptimizerStateHandler(StatefulHandler):
    """Handles an optimizer, distributed or not.

    Residuals of a compression stay each rank's own: one that comes in begins with none.
    """

    def restore(self) -> None:
        self._load(copy.deepcopy(self._kept), is_own=True)
        for group in self.value.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def load(self, dump: Any) -> None:
        self._load(dump, is_own=False)

    def _load(self, state: Any, is_own: bool) -> None:
        with loading_in_place(self.value, exactly=True):
            if isinstance(self.value, Distributed):
                self.value._load(state, is_own)
            else:
                self.value.load_state_dict(state)

    def sync(self) -> None:
        value = self.value
        is_distributed = isinstance(value, Distributed)
        send_optimizer_state(
            value, value._common_state_dict if is_distributed else value.state_dict, 0
        )

    def gather(self) -> None:
        if hasattr(self.value, "consolidate_exchange_state"):  # a DistributedOptimizer
            self.value.consolidate_exchange_state()

    def reset(self) -> None:
        if isinstance(self.value, Distributed):
            self.value._restart()


class PositionHandler(StatefulHandler):
    """Handles positions in data that all ranks share: `ShardSampler` and ``hvd.shard``."""

    def sync(self) -> None:
        sharding = self.value.sharding
        # Of a spare, too, the global batches are those of the start.
        here = {**self.value.state_dict(), "shares": sharding.shares or sharding.size}
        self.value.load_state_dict(collectives.broadcast_object(here, 0, "elastic.position"))

    def merge(self) -> None:
        # The function is called again, and its loop goes on where the last commit was.
        self.restore()

    def gather(self) -> None:
        """Do nothing: rank 0 has it."""


class SamplerStateHandler(StatefulHandler):
    """Handles an `ElasticSampler`, and merges the samples that the ranks have processed."""

    def save(self) -> None:
        self._kept = self.value.state_dict()  # a copy, made faster than by deepcopy

    def restore(self) -> None:
        self.value.load_state_dict(self._kept)

    def sync(self) -> None:
        self.merge()

    def merge(self) -> None:
        states = collectives.allgather_object(self.value.state_dict(), "elastic.ElasticSampler")
        epoch = states[0]["epoch"]
        processed = [state["processed_indices"] for state in states if state["epoch"] == epoch]
        self.value.load_state_dict({"epoch": epoch, "processed_indices": set().union(*processed)})

    def reset(self) -> None:
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (ShardSampler, PositionHandler),
    (Batches, PositionHandler),
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
        handlers = {name: _handler_of(value) for name, value in given.items()}
        self._handlers = {name: each for name, each in handlers.items() if each is not None}
        super().__init__(**{name: given[name] for name in given if name not in self._handlers})
        for name, handler in self._handlers.items():
            if hasattr(self, name):
                raise ValueError(f"{name!r} is a part of {type(self).__name__}; name it otherwise")
            setattr(self, name, handler.value)

    def save(self) -> None:
        """Copy the states and the other attributes."""
        super().save()
        for handler in self._current():
            handler.save()

    def restore(self) -> None:
        """Restore the last saved states and attributes."""
        super().restore()
        for handler in self._current():
            handler.restore()

    def sync(self) -> None:
        """Overwrite all ranks' state by that of rank 0, and save; collective.

        The records of the ranks' samplers are merged.

        Raises:
            HorovodInternalError: the ranks disagree on parameters, a state cannot be pickled,
                or communication failed.
        """
        super().sync()
        for handler in self._current():
            handler.sync()
        self.save()

    def merge(self) -> None:
        """Merge the ranks' processed samples, and save; collective."""
        for handler in self._current():
            handler.merge()
        self.save()

    def gather(self) -> None:
        """Merge the ranks' samples, and bring what the optimizers' exchanges remember to rank 0."""
        for handler in self._current():
            handler.gather()

    def dump(self) -> Any:
        """Return the states and the other attributes, by name."""
        return {
            **super().dump(),
            "handlers": {name: each.dump() for name, each in self._handlers.items()},
        }

    def load(self, dump: Any) -> None:
        """Load the states, set the other attributes, and save them."""
        super().load(dump)
        for handler, loaded in zip(self._current(), dump["handlers"].values(), strict=True):
            handler.load(loaded)
        self.save()

    def reset(self) -> None:
        """Adapt the optimizer's exchange and the samplers' shares to a new world."""
        for handler in self._current():
            handler.reset()

    def _current(self) -> Iterator[StateHandler]:
        """Yield the handlers, with the current values of their attributes."""
        for name, handler in self._handlers.items():
            handler.value = getattr(self, name)
            yield handler


def _handler_of(value: Any) -> StateHandler | None:
    if isinstance(value, StateHandler):
        return value
    found = next((handler for kind, handler in _registry if isinstance(value, kind)), None)
    if found is None and _has_state(value):
        found = StatefulHandler
    return None if found is None else found(value)


def _has_state(value: Any) -> bool:
    # A class has these methods, too, but no state.
    return not isinstance(value, type) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    )
