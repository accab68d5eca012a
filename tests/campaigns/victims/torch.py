"""Optimizers of PyTorch that can part."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.world import parts
from tests.campaigns.divergence import Parting

KINDS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "SGD": lambda: {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    "RMSprop": lambda: {"momentum": 0.5},
    "Adam": lambda: {"lr": torch.tensor(0.01)},
}
# Of groups; those that ranks compare.
_NAMES = {
    *("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "betas", "eps"),
    *("amsgrad", "alpha", "centered", "lr_decay", "initial_accumulator_value"),
}


class Victim:
    """A small model, with an embedding; see `tests.campaigns.divergence.Victim`."""

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(6, 8)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 2),
        )
        self.model = torch.nn.Sequential()
        self.model.add_module("table", self.table)
        self.model.add_module("body", self.body)
        self._options = options
        self._set = options.get("process_set", hvd.global_process_set)
        chosen = {"lr": 0.01, **_OPTIONS.get(kind, dict)()}
        self.optimizer: Any = getattr(torch.optim, kind)(self.model.parameters(), **chosen)
        self._chance = random.Random(0)

    def wrap(self) -> Victim:
        """Make the optimizer a distributed one."""
        model = {"model": self.model} if parts.current.are_fixed else {}
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, self.model.named_parameters(), **model, **self._options
        )
        return self

    def step(self, number: int, samples: int | None = None) -> None:
        """Make a step."""
        is_done = False
        while not is_done:
            generator = torch.Generator().manual_seed(1000 * number + hvd.virtual_rank())
            self.optimizer.zero_grad()
            indices = torch.randint(6, (samples or 4,), generator=generator)
            if len(indices) == 1:
                indices = indices.repeat(2)  # a batch normalisation needs two
            torch.nn.functional.cross_entropy(self.model(indices), indices % 2).backward()
            self.optimizer.step(**({} if samples is None else {"batch_size": samples}))
            is_done = self.optimizer.stepped

    def broadcast(self, root: int) -> None:
        """Give all ranks the weights and the state of one."""
        hvd.broadcast_parameters(self.model.state_dict(), root)
        hvd.broadcast_optimizer_state(self.optimizer, root)

    def partings(self) -> dict[str, Parting]:
        """Return an option each, a weight, a state, schedules and loads."""
        group = self.optimizer.param_groups[0]
        options = {
            f"option {name}": Parting(self._changing(name), f"the optimizer's {name} ", True)
            for name in group
            if name in _NAMES
        }
        any_of_state = r"the (weight|optimizer's \w+ of) '"
        return {
            **options,
            "a weight": Parting(self._change_weight, r"the weight 'body\.3\.weight'"),
            "a state": Parting(self._change_state, any_of_state, follows=True),
            "rows that a lookup scales": Parting(self._renormalise, "the weight 'table.weight'"),
            "a schedule by its own loss": Parting(self._plateau, "the optimizer's lr ", True),
            "a state that is loaded": Parting(self._load_state, any_of_state, follows=True),
            "weights that are loaded": Parting(self._load_weights, any_of_state),
        }

    def _changing(self, name: str) -> Any:
        def change() -> None:
            for group in self.optimizer.param_groups:
                value = group[name]
                if isinstance(value, bool):
                    group[name] = not value
                elif isinstance(value, tuple):
                    group[name] = (value[0], 0.5 * value[1])
                elif isinstance(value, torch.Tensor):
                    value.mul_(2)
                else:
                    group[name] = 2 * value + 1e-3

        return change

    def _change_weight(self) -> None:
        weight = self.body[3].weight
        weight.data[self._chance.randrange(2), self._chance.randrange(16)] += 0.5

    def _change_state(self) -> None:
        states = self.optimizer.state[self.body[3].weight]
        name = self._chance.choice([n for n, v in states.items() if isinstance(v, torch.Tensor)])
        states[name].add_(1)

    def _renormalise(self) -> None:
        with torch.no_grad():
            torch.embedding_renorm_(self.table.weight, torch.tensor([2]), 0.1, 2.0)

    def _plateau(self) -> None:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        for loss in (1.0, 2.0):
            schedule.step(loss)

    def _load_state(self) -> None:
        state = self.optimizer.state_dict()
        for entries in state["state"].values():
            entries.update({n: v * 2 for n, v in entries.items() if isinstance(v, torch.Tensor)})
        self.optimizer.load_state_dict(state)

    def _load_weights(self) -> None:
        values = {name: 0.5 * value.detach() for name, value in self.body.named_parameters()}
        self.body.load_state_dict(values, strict=False)


def make(kind: str, options: Mapping[str, Any], is_named: bool = False) -> Victim:
    """Return a victim; only the names of its partings are asked for if ``is_named``."""
    victim = Victim(kind, options)
    return victim if is_named else victim.wrap()
