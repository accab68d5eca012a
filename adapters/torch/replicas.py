"""The comparison across ranks of a torch optimizer and the weights that it changes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.gradients import ReplicaCheck, describe_optimizer, describe_weights
from hvdlite.torch.tensors import to_array

_REMEDY = (
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)


class Replica:
    """An optimizer whose weights are the same on all ranks.

    Args:
        optimizer: that; it is not kept alive.
        names: of its parameters, which may become more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = names

    def make_check(self, parameters: Sequence[torch.Tensor]) -> ReplicaCheck:
        """Return what compares the optimizer and some of its weights across ranks."""
        return ReplicaCheck(lambda: self._describe(parameters), _REMEDY)

    def _describe(self, parameters: Sequence[torch.Tensor]) -> list[tuple[str, Any]]:
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        weights = ((self._names[each], to_array(each.detach())) for each in parameters)
        return [
            *describe_optimizer(type(optimizer).__name__, *map(_numbers, optimizer.param_groups)),
            *describe_weights(weights),
        ]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, with numbers in the place of tensors of one element."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
    }
