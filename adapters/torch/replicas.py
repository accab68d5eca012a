"""The options, the state and the weights of a PyTorch optimizer, as ranks compare them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hvdlite.gradients.replicas import (
    DEVICE_STRIDE,
    Find,
    ReplicaCheck,
    describe_optimizer,
    state_label,
    weight_label,
)
from hvdlite.torch.tensors import to_array

_REMEDY = (
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)
_PLAIN = frozenset({bool, int, float, str, type(None)})

FindOptimizer = Callable[[], torch.optim.Optimizer | None]


def make_check(
    find_optimizer: FindOptimizer,
    names: Mapping[torch.Tensor, str],
    parameters: Collection[torch.Tensor],
    find_constants: Callable[[], Iterable[tuple[str, Find]]] = tuple,
) -> ReplicaCheck:
    """Make the comparison of an optimizer, and of parameters, across ranks.

    Args:
        find_optimizer: returns the optimizer, or None if it is gone.
        parameters: as they are whenever the ranks compare them.
        find_constants: as `find_frozen`.
    """
    replica = _Replica(find_optimizer, names, parameters)
    return ReplicaCheck(
        replica.options,
        replica.values,
        _REMEDY,
        to_array=to_array,
        stride=replica.stride,
        constants=find_constants,
    )


def find_frozen(names: Any, attached: Set[int] = frozenset()) -> Iterator[tuple[str, Find]]:
    """Yield the parameters in `Names` that are not trained, but for those attached, by id."""
    for parameter, name in {**names.given, **names}.items():
        if not parameter.requires_grad and id(parameter) not in attached:
            yield weight_label(name), partial(_of_weak, weakref.ref(parameter))


@dataclass
class _Replica:
    """A rank's optimizer and its parameters; arguments as of `make_check`."""

    _find_optimizer: FindOptimizer
    _names: Mapping[torch.Tensor, str]
    _parameters: Collection[torch.Tensor]
    # The options, and what they were made from.
    _options: list[tuple[str, Any]] = field(default_factory=list)
    _made_from: list[Any] | None = None

    def options(self) -> list[tuple[str, Any]]:
        """Return the class and the options of each group; those on a device are `values`."""
        optimizer = self._find_optimizer()
        if optimizer is None:
            return []
        items: list[Any] = [type(optimizer).__name__]
        for group in optimizer.param_groups:
            items += [item for item in group.items() if item[0] != "params"]
        # Usually all are as in the last step, and immutable.
        if self._made_from is not None and _are_equal(items, self._made_from):
            return self._options
        self._made_from = items if all(map(_is_plain, items)) else None
        groups = map(host_options, optimizer.param_groups)
        self._options = describe_optimizer(type(optimizer).__name__, *groups)
        return self._options

    def values(self) -> Iterator[tuple[str, Find]]:
        """Return the weights, the optimizer's state and its options that are tensors."""
        for parameter in self._parameters:
            yield weight_label(self._names[parameter]), parameter.detach
        optimizer = self._find_optimizer()
        if optimizer is None:
            return
        for parameter in self._parameters:
            name = self._names[parameter]
            for path in _paths(optimizer.state.get(parameter), ()):
                find = partial(_find, self._find_optimizer, "state", (parameter, *path))
                yield state_label(_joined(path), name), find
        for number, group in enumerate(map(host_options, optimizer.param_groups)):
            for name in sorted(group):
                if isinstance(group[name], torch.Tensor):
                    find = partial(_find, self._find_optimizer, "param_groups", (number, name))
                    yield state_label(f"{name} in group {number}"), find

    def stride(self) -> int:
        """Return the number of steps from slice to slice."""
        return DEVICE_STRIDE if any(not each.is_cpu for each in self._parameters) else 1


def _is_plain(item: Any) -> bool:
    """Return whether an option is of an immutable type, and no tensor."""
    value = item[1] if type(item) is tuple else item
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, value)))


def _are_equal(items: Sequence[Any], others: Sequence[Any]) -> bool:
    try:
        return items == others
    except RuntimeError:  # torch's, of a tensor that has taken a number's place
        return False


def host_options(group: Mapping[str, Any], waits: bool = False) -> dict[str, Any]:
    """Return the options of a group, with numbers in place of tensors of one element.

    Args:
        waits: also of those on a device.
    """

    def read(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.numel() == 1
        return value.item() if is_number and (waits or value.is_cpu) else value

    return {name: read(value) for name, value in group.items()}


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Return where tensors and numbers are in nested containers, in a reproducible order."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _paths(each, (*path, number))
    elif _as_tensor(value) is not None:
        yield path


def _of_weak(weight: weakref.ref[torch.Tensor]) -> Any:
    return _as_tensor(weight())


def _as_tensor(value: Any) -> Any:
    """Return a tensor or a number of a state as something to compare; None: it is not compared."""
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return None
    is_float8 = value.dtype.itemsize == 1 and value.is_floating_point()
    if value.layout is not torch.strided or value.is_quantized or is_float8:
        return None
    return value.detach()


def _joined(path: Sequence[Any]) -> str:
    first, *others = path
    return f"{first}" + "".join(f"[{each!r}]" for each in others)


def _find(find_optimizer: FindOptimizer, part: str, path: Sequence[Any]) -> Any:
    """Return what is at a path in a part of the optimizer now; None: nothing to compare."""
    value: Any = getattr(find_optimizer(), part, None)
    for key in path:
        try:
            value = value.get(key) if isinstance(value, Mapping) else value[key]
        except (IndexError, TypeError):  # it is another state now
            return None
    return _as_tensor(value)
