"""The same state on every rank, and on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvdlite import collectives, runtime
from hvdlite.recipe import Checkpoint
from hvdlite.torch.collectives import broadcast_async_, synchronize
from hvdlite.torch.tensors import to_array, to_tensor

Parameters = (
    Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor] | torch.nn.Module
)


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Overwrite tensors with those of rank ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or any other dict,
            list or generator of names and tensors or of tensors alone, or a module (its
            state_dict). Entries that are no tensors (None) are left alone.
        root_rank: the rank whose values count.

    Raises:
        ValueError: there is no such rank, or ``params`` is something else.
        HorovodInternalError: the ranks disagree on names, shapes or dtypes.
    """
    prefix = runtime.engine().unnamed("broadcast_parameters")
    tensors = [(name, entry) for name, entry in _named(params) if isinstance(entry, torch.Tensor)]
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    collectives.agree_on(f"{prefix}: its tensors", layout)
    handles = [
        broadcast_async_(tensor, root_rank, f"{prefix}: {number} {name}")
        for number, (name, tensor) in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Parameters) -> list[tuple[str, Any]]:
    if isinstance(params, torch.nn.Module):
        return list(params.state_dict().items())
    if isinstance(params, torch.Tensor):
        raise ValueError("params is one tensor; use hvd.broadcast_(tensor, root_rank)")
    if isinstance(params, Mapping):
        return sorted(params.items())
    entries = list(params)
    if all(isinstance(entry, tuple) and len(entry) == 2 for entry in entries):
        return entries
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return [("", entry) for entry in entries]
    raise ValueError(
        "params must be a dict, a module, or a sequence of tensors or of (name, tensor) pairs, "
        "such as model.state_dict() or model.named_parameters()"
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Give every rank's optimizer the state and the options of rank ``root_rank``'s.

    No step is taken and no weight is moved, also where the optimizers have no state yet.

    Args:
        optimizer: any torch optimizer, wrapped or not; on all ranks over the same parameters.
        root_rank: the rank whose state counts.
        model: not needed; accepted because Horovod takes it.

    Raises:
        ValueError: there is no such rank.
        HorovodInternalError: the ranks disagree on the parameters, or the state cannot be
            pickled.
    """
    groups = [
        [(tuple(parameter.shape), str(parameter.dtype)) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    name = runtime.engine().unnamed("broadcast_optimizer_state")
    collectives.agree_on(f"{name}: its parameters", [str(group) for group in groups])
    state = _map_tensors(lambda tensor: tensor.detach().cpu(), optimizer.state_dict())
    received = collectives.broadcast_object(state, root_rank, name)
    if collectives.world.rank() != root_rank:
        optimizer.load_state_dict(received)


class TensorCheckpoint(Checkpoint):
    """A checkpoint whose trees may hold tensors; they come back as tensors on the host."""

    def save(self, state: Any) -> None:
        """Write the state of rank 0, in place of what the file held before; collective.

        Args:
            state: as `hvdlite.recipe.Checkpoint.save`, with tensors; e.g.
                ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``.

        Raises:
            TypeError: something else is in the tree.
            CheckpointError: the file cannot be written.
        """
        super().save(_map_tensors(lambda tensor: {_TENSOR: to_array(tensor)}, state))

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Read the file on rank 0 and return an equal tree on every rank; collective.

        Args:
            default: what to return if there is no such file; without it that is an error.

        Raises:
            CheckpointError: the file is missing, damaged, or not a checkpoint.
        """
        return _restore(super().load(*args, **kwargs))


def checkpoint(path: str | os.PathLike[str]) -> TensorCheckpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together."""
    return TensorCheckpoint(path)


_TENSOR = "torch.Tensor"


def _map_tensors(convert: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return convert(tree)
    if isinstance(tree, Mapping):
        return {key: _map_tensors(convert, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_tensors(convert, value) for value in tree)
    return tree


def _restore(tree: Any) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_TENSOR}:
            return to_tensor(tree[_TENSOR])
        return {key: _restore(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_restore(value) for value in tree)
    return tree
