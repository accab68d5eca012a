"""Training with PyTorch that goes on after a failure: ``hvd.elastic``."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from hvdlite import objects
from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.torch.elastic_sampler import ElasticSampler
from hvdlite.torch.state import broadcast_optimizer_state, broadcast_parameters, has_extra_state

__all__ = ["ElasticSampler", "HostUpdate", "ObjectState", "State", "TorchState", "run"]


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class TorchState(ObjectState):
    """The state of a model, its optimizer, and whatever belongs to them.

    Of everything that has ``state_dict()`` and ``load_state_dict()`` (models, optimizers,
    learning rate schedulers, gradient scalers, `ElasticSampler`), a copy of the state is kept
    in memory; everything else is copied itself. All are attributes::

        state = TorchState(model, optimizer, scheduler=scheduler, epoch=0, batch=0)
        state.model, state.epoch

    A `DistributedOptimizer` must be among them: after a failure in the middle of a step it has
    to forget that step's gradients. Gradients themselves are not kept, so commit between steps
    and not while they add up.

    Args:
        model: None: there is none.
        optimizer: wrapped or not; None: there is none.
        **kwargs: the other attributes, and their values at the start.

    Raises:
        ValueError: the class has an attribute or a method of such a name.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        # In the order given, which is the same on all ranks.
        self._stateful = tuple(name for name, value in given.items() if _has_state(value))
        super().__init__(**{name: given[name] for name in given if name not in self._stateful})
        for name in self._stateful:
            if hasattr(self, name):
                raise ValueError(f"{name!r} is a part of {type(self).__name__}; name it otherwise")
            setattr(self, name, given[name])
        self._kept: dict[str, Any] = {}
        self._keep_states()

    def save(self) -> None:
        """Keep copies of the states and of the other attributes."""
        super().save()
        self._keep_states()

    def restore(self) -> None:
        """Load what was saved last into the objects, and set the other attributes to it."""
        super().restore()
        for name, part in self._parts():
            # Some take over the tensors that they are given.
            part.load_state_dict(_copy(part, self._kept[name]))
            for parameter in _parameters(part):
                parameter.grad = None  # of a step that was given up

    def sync(self) -> None:
        """Give all ranks rank 0's weights, optimizer and other attributes, and save; collective.

        What the ranks' samplers have recorded is merged.

        Raises:
            HorovodInternalError: the ranks disagree on parameters, a state cannot be pickled,
                or communication failed.
        """
        super().sync()
        for name, part in self._parts():
            if not isinstance(part, ElasticSampler):
                _spread(f"elastic.{name}", part)
        self.merge()

    def merge(self) -> None:
        """Tell all ranks which samples each has processed, and save; collective."""
        for name, part in self._parts():
            if isinstance(part, ElasticSampler):
                _merge(f"elastic.{name}", part)
        self.save()

    def reset(self) -> None:
        """Adapt to a new world: the optimizer's exchange, and the samplers' shares."""
        for _, part in self._parts():
            if isinstance(part, ElasticSampler):
                part.reset()
            elif hasattr(part, "_restart"):  # a DistributedOptimizer
                part._restart()

    def _parts(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._stateful]

    def _keep_states(self) -> None:
        self._kept = {name: _copy(part, part.state_dict()) for name, part in self._parts()}


def _has_state(value: Any) -> bool:
    # A class has the methods as well, and no state.
    return not isinstance(value, type) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    )


def _copy(part: _Stateful, state: Any) -> Any:
    # A sampler copies its set, of perhaps a million numbers, itself and much faster.
    return state if isinstance(part, ElasticSampler) else copy.deepcopy(state)


def _parameters(part: _Stateful) -> list[torch.Tensor]:
    if isinstance(part, torch.nn.Module):
        return list(part.parameters())
    if isinstance(part, torch.optim.Optimizer):
        return [parameter for group in part.param_groups for parameter in group["params"]]
    return []


def _spread(name: str, part: _Stateful) -> None:
    """Give all ranks rank 0's state."""
    if isinstance(part, torch.optim.Optimizer):
        broadcast_optimizer_state(part, 0)
    elif isinstance(part, torch.nn.Module) and not has_extra_state(part):
        broadcast_parameters(part, 0)
    else:
        part.load_state_dict(objects.broadcast_object(part.state_dict(), 0, name))


def _merge(name: str, sampler: ElasticSampler) -> None:
    """Have every rank know what all have processed of the epoch that rank 0 is in."""
    states = objects.allgather_object(sampler.state_dict(), name)
    epoch = states[0]["epoch"]
    processed = [state["processed_indices"] for state in states if state["epoch"] == epoch]
    sampler.load_state_dict({"epoch": epoch, "processed_indices": set().union(*processed)})
