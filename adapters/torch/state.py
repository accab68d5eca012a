"""Broadcasts of parameters and optimizer state, and checkpoints with tensors."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import IO, Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdlite import collectives
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import CheckpointError
from hvdlite.gradients.lone_steps import LoneSteps
from hvdlite.recipe import Checkpoint
from hvdlite.recipe._tree import flatten, map_leaves
from hvdlite.recipe.checkpoints import TORCH_SUFFIXES
from hvdlite.torch.collectives import broadcast_async_
from hvdlite.torch.handles import synchronize
from hvdlite.torch.tensors import check_whole, to_array, to_tensor
from hvdlite.world import world

# The last part of the keys under which torch stores the result of get_extra_state().
_EXTRA_STATE = "_extra_state"

_REMEDY = "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
_lone_steps: LoneSteps | None = None
_watched: weakref.ref[torch.optim.Optimizer] | None = None

Parameters = (
    Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor] | torch.nn.Module
)


def broadcast_parameters(
    params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with those of rank ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or any other dict,
            list or generator of names and tensors or of tensors alone, or a module (its
            state_dict). Entries that are None are skipped.
        root_rank: the rank whose values count.
        process_set: The ranks that take part.

    Raises:
        ValueError: There is no such rank, or ``params`` holds another type, or the result of a
            module's ``get_extra_state``, which cannot be overwritten in place.
        HorovodInternalError: The ranks disagree on names, shapes or dtypes.
    """
    engine = runtime.engine(process_set)
    prefix = engine.unnamed("broadcast_parameters")
    collectives.checked_root(engine, root_rank)  # before waiting for the other ranks
    tensors = [(name, _checked(name, entry)) for name, entry in _named(params) if entry is not None]
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    collectives.agree_on(prefix + ": its tensors", layout, process_set)
    handles = [
        broadcast_async_(tensor, root_rank, f"{prefix}: {number} {name}", process_set)
        for number, (name, tensor) in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if engine.size > 1:
        watch_steps(sum(tensor.numel() * tensor.itemsize for _, tensor in tensors))


def watch_steps(nbytes: int = 0) -> None:
    """Warn if the first plain optimizer that steps from now on exchanges nothing.

    Args:
        nbytes: the size of the weights, if it is known.
    """
    global _lone_steps, _watched
    if _lone_steps is None:
        register_optimizer_step_post_hook(_after_step)  # for good: it cannot remove itself
    else:
        _lone_steps.end()
    _lone_steps, _watched = LoneSteps(nbytes), None


def _after_step(optimizer: Any, *_: Any) -> None:
    global _watched
    if _lone_steps is None or _lone_steps.is_over or hasattr(optimizer, "stepped"):
        return
    _watched = _watched or weakref.ref(optimizer)
    is_first = _watched() is optimizer
    if torch.distributed.is_initialized():  # for DDP, say, over any library
        _lone_steps.end()
    elif is_first and _lone_steps.count() and not _is_inner(optimizer):
        _lone_steps.warn(type(optimizer).__name__, _REMEDY)


def _is_inner(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a wrapped optimizer has its parameters, as one around it does."""
    from hvdlite.torch.wrapping import living  # which imports this module

    wrapped = {id(each) for outer in living() for each in outer._trainable()}
    groups = (group["params"] for group in optimizer.param_groups)
    return not wrapped.isdisjoint(map(id, chain.from_iterable(groups)))


def _named(params: Parameters) -> list[tuple[str, Any]]:
    if isinstance(params, torch.nn.Module):
        return list(params.state_dict().items())
    if isinstance(params, torch.Tensor):
        raise ValueError("params is one tensor; use hvd.broadcast_(tensor, root_rank)")
    if isinstance(params, Mapping):
        return sorted(params.items(), key=lambda entry: str(entry[0]))
    entries: list[Any] = list(params)
    if all(isinstance(entry, tuple) and len(entry) == 2 for entry in entries):
        return entries
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return [("", entry) for entry in entries]
    raise ValueError(
        "params must be a dict, a module, or a sequence of tensors or of (name, tensor) pairs, "
        "such as model.state_dict() or model.named_parameters()"
    )


def _checked(name: Any, entry: Any) -> torch.Tensor:
    """Return the entry if it is a tensor; others would stay different from rank to rank."""
    found = f"rank {world.rank()}: params[{name!r}] is a {type(entry).__name__}"
    if _is_extra_state(name):
        raise ValueError(
            f"{found} from get_extra_state(), which cannot be overwritten in place; use "
            "model.load_state_dict(hvd.broadcast_object(model.state_dict(), root_rank))"
        )
    if not isinstance(entry, torch.Tensor):
        raise ValueError(
            f"{found}, expected a tensor; pass each model.state_dict() by itself, an optimizer "
            "to hvd.broadcast_optimizer_state, and anything else to hvd.broadcast_object, which "
            "returns it"
        )
    return entry


def _is_extra_state(name: Any) -> bool:
    return str(name).rpartition(".")[-1] == _EXTRA_STATE


def has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether a module has extra state, which `broadcast_parameters` refuses."""
    return any(_is_extra_state(name) for name in module.state_dict())


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite every rank's optimizer state and options by those of rank ``root_rank``.

    This takes no step and changes no weight, also if the optimizers have no state yet. The dicts
    and tensors of groups and state stay the same objects, with other content, for those who hold
    one of them. New tensors have the root's dtypes.

    Args:
        optimizer: any torch optimizer, wrapped or not, of the same parameters on all ranks.
        root_rank, process_set: As for `broadcast_parameters`.
        model: Ignored; accepted for compatibility with Horovod.

    Raises:
        ValueError: There is no such rank.
        MismatchError: on all ranks; their optimizers are of different classes, or of different
            parameters.
        HorovodInternalError: the state cannot be pickled, or communication failed.
    """
    send_optimizer_state(optimizer, optimizer.state_dict, root_rank, process_set)


def send_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state_dict: Callable[[], Mapping[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast as `broadcast_optimizer_state` what ``state_dict`` returns on the root."""
    for group in optimizer.param_groups:
        check_whole(*group["params"])
    groups = {
        f"parameter group {number}": [
            (tuple(parameter.shape), str(parameter.dtype)) for parameter in group["params"]
        ]
        for number, group in enumerate(optimizer.param_groups)
    }
    engine = runtime.engine(process_set)
    name = engine.unnamed("broadcast_optimizer_state")
    collectives.checked_root(engine, root_rank)  # before waiting for the other ranks
    described = {
        "the optimizer's class": type(optimizer).__name__,
        "the number of parameter groups": len(groups),
        **groups,
    }
    collectives.agree_on(name + ": the optimizer", described, process_set)
    is_root = world.rank() == root_rank
    state = map_leaves(_to_host, state_dict()) if is_root else None
    received = collectives.broadcast_object(state, root_rank, name, process_set)
    if not is_root:
        with loading_in_place(optimizer, exactly=True):
            optimizer.load_state_dict(received)


@contextlib.contextmanager
def loading_in_place(optimizer: torch.optim.Optimizer, exactly: bool = False) -> Iterator[None]:
    """Let ``load_state_dict`` change the dicts of groups and state, where torch replaces them.

    Learning rate schedulers, and optimizers around others, hold these dicts. Optimizers that the
    optimizer holds keep theirs, too.

    Args:
        exactly: whether tensors get the dtype that they have in the state dict, where torch
            converts them to the parameter's, and are overwritten where that is possible.
    """
    with contextlib.ExitStack() as stack:
        for each in _with_inner(optimizer, []):
            for hook in _hooks_in_place(each, exactly):
                stack.callback(hook.remove)
        yield


def _with_inner(optimizer: Any, found: list[Any]) -> list[Any]:
    """Return an optimizer and those that it holds."""
    if isinstance(optimizer, torch.optim.Optimizer) and not any(o is optimizer for o in found):
        found.append(optimizer)
        for each in vars(optimizer).values():
            _with_inner(each, found)
    return found


def _hooks_in_place(optimizer: Any, exactly: bool) -> list[Any]:
    """Register the hooks that put the old dicts back, with the content of the new ones."""
    before: list[Any] = []

    def begin(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
        before[:] = optimizer.param_groups, optimizer.state, state_dict

    def end(optimizer: Any) -> None:
        groups, state, given = before
        before.clear()
        indices = [index for group in given["param_groups"] for index in group["params"]]
        parameters = [parameter for group in groups for parameter in group["params"]]
        state_given = {
            parameter: given["state"].get(index)
            for parameter, index in zip(parameters, indices, strict=True)
        }
        if optimizer.state is not state:
            optimizer.state = _merged(state, optimizer.state, state_given if exactly else None)
        if optimizer.param_groups is not groups:
            groups[:] = [
                _merged(old, new, each if exactly else None)
                for old, new, each in zip(
                    groups, optimizer.param_groups, given["param_groups"], strict=True
                )
            ]
            optimizer.param_groups = groups

    with contextlib.suppress(AttributeError):  # its constructor does not call torch's
        return [
            optimizer.register_load_state_dict_pre_hook(begin),
            optimizer.register_load_state_dict_post_hook(end),
        ]
    return []


def _merged(old: Any, new: Any, given: Any) -> Any:
    """Return what has been loaded: the old object with its content, where it can hold that.

    Args:
        old: what was there before.
        new: what torch has made of the state dict.
        given: what the state dict has; None: keep what torch has made, and change no tensor.
    """
    if isinstance(new, dict):
        kept, entries = (each if isinstance(each, Mapping) else {} for each in (old, given))
        content = {
            key: _merged(kept.get(key), value, entries.get(key)) for key, value in new.items()
        }
        merged = old if isinstance(old, dict) else new
        merged.clear()
        merged.update(content)
        return merged
    if isinstance(new, torch.Tensor) and isinstance(given, torch.Tensor):
        if _is_like(old, given):
            with torch.no_grad():
                return old.copy_(given)
        if new.dtype != given.dtype:
            return given.to(new.device)
    return new


def _is_like(tensor: Any, other: torch.Tensor) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.layout is other.layout
    )


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


# In the file a tensor is a dict of this one key, so that it differs from an array.
_TENSOR = "torch.Tensor"
# All that torch.load reads by default (weights_only=True), and that this checkpoint can hold.
_CONTAINERS = (dict, OrderedDict, list, tuple, torch.Size)
_PLAIN = (type(None), bool, int, float, str, bytes)


class TensorCheckpoint(Checkpoint):
    """A checkpoint whose trees may hold tensors; they come back as tensors on the host.

    Save for example ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``. A path
    that ends in ``.pt`` or ``.pth`` is written by ``torch.save``.
    """

    _tensor_key = _TENSOR

    def _encode(self, state: Any) -> Any:
        return map_leaves(
            lambda leaf: {_TENSOR: to_array(leaf)} if isinstance(leaf, torch.Tensor) else leaf,
            state,
        )

    def _decode(self, tree: Any) -> Any:
        return map_leaves(
            lambda leaf: to_tensor(leaf[_TENSOR]) if _is_marked(leaf) else leaf, tree, _is_marked
        )

    def _writer(self, state: Any, copied: bool = False) -> Callable[[IO[bytes]], object]:
        if self.path.suffix not in TORCH_SUFFIXES:
            return super()._writer(state, copied)
        map_leaves(_check_for_torch, state, is_leaf=lambda node: type(node) not in _CONTAINERS)
        if copied:
            # As a file in memory, which keeps containers and shared storages, off the device.
            content = io.BytesIO()
            torch.save(state, content)
            return lambda file: file.write(content.getbuffer())
        return lambda file: torch.save(state, file)

    def _read_torch(self, file: IO[bytes]) -> tuple[Any, list[Any]]:
        # torch.load does not compare the checksums that torch.save writes.
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} does not match its checksum")
        file.seek(0)
        try:
            tree = torch.load(file, map_location="cpu", weights_only=True)
            return flatten(self._encode(tree))[:2]
        except (pickle.UnpicklingError, TypeError) as error:
            found = f" ({error})" if isinstance(error, TypeError) else ""
            raise CheckpointError(
                f"{file.name} holds other types than tensors and plain values{found}; if you trust "
                "the file, load it by torch.load(path, weights_only=False) on every rank"
            ) from error


def checkpoint(path: str | os.PathLike[str], keep: int = 1) -> TensorCheckpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together.

    Args:
        path: The file, on the host of rank 0. It need not exist. ``.pt`` and ``.pth`` are written
            by ``torch.save``, ``.safetensors`` as a safetensors file, other suffixes as npz. A file
            is read by its content.
        keep: As for `hvdlite.checkpoint`.
    """
    return TensorCheckpoint(path, keep)


def _check_for_torch(leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        check_whole(leaf)
    elif type(leaf) not in _PLAIN:
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"found {kind}; a file for torch.load holds dict, list, tuple, None, bool, int, float, "
            "str, bytes and tensors; use torch.from_numpy() or .item(), or name the file .npz"
        )


def _is_marked(node: Any) -> bool:
    return (
        isinstance(node, dict)
        and node.keys() == {_TENSOR}
        and isinstance(node[_TENSOR], np.ndarray)
    )
