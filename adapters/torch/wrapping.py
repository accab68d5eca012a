"""The base class of wrapped optimizers, and checks of `DistributedOptimizer`'s arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch.amp import GradScaler

from hvdlite.arguments import check_count
from hvdlite.compression import check_groups as check_group_numbers
from hvdlite.horovod import answers
from hvdlite.process_sets import ProcessSet, global_process_set

#: The key of hvdlite's part of an optimizer's state dict.
STATE = "hvdlite"

_requires_grad = attrgetter("requires_grad")

# Ranks make their optimizers in one order, those of a process set among themselves. The numbers
# outlive the engine, so that exchanges keep their names whichever is the first to use a new world.
_numbers: WeakKeyDictionary[ProcessSet, Iterator[int]] = WeakKeyDictionary()


class Wrapped:
    """The methods that `DistributedOptimizer` adds to every optimizer's class."""

    _parameter_names: dict[torch.Tensor, str]
    param_groups: list[dict[str, Any]]

    def _trainable(self) -> list[torch.Tensor]:
        groups = [group["params"] for group in self.param_groups]
        return [*filter(_requires_grad, itertools.chain.from_iterable(groups))]

    def _prepare_unscaling(self, enabled: bool) -> None:
        """Prepare for a GradScaler that unscales gradients, or would do so if it were enabled."""

    def _prepare_scaled_step(self, batch_size: int | None) -> None:
        """Prepare for a GradScaler that decides whether a step is taken."""

    def _end_scaled_step(self) -> None:
        """End a step that a GradScaler has taken or skipped."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: a copy's parameters would not "
            "be exchanged; copy optimizer.state_dict(), or the model, and wrap a new optimizer"
        )


def check_optimizer(optimizer: Any) -> None:
    """Require an optimizer that can be wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
    if not getattr(type(optimizer).step, "hooked", False):
        raise TypeError(
            f"{type(optimizer).__name__} does not run torch's step hooks, on which the exchange "
            "relies; call super().__init__() in its constructor"
        )


def change_class(optimizer: torch.optim.Optimizer, addition: type) -> Any:
    """Change an optimizer's class to a subclass of the same name with the addition's methods."""
    kind = type(optimizer)
    # Under the alias as in Horovod: some programs look for its name in the class's module.
    module = "horovod.torch.optimizer" if answers("horovod.torch") else kind.__module__
    optimizer.__class__ = type(kind.__name__, (addition, kind), {"__module__": module})
    return optimizer


def names_of(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """Return names by parameter, in the order of registration."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {parameter: f"parameter.{number}" for number, parameter in enumerate(own)}
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(map(_is_named, pairs)):
        raise ValueError(
            f"named_parameters is a {type(named_parameters).__name__}, and must be pairs of a name "
            "and a parameter, such as model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}")
    unnamed = len(set(own) - {parameter for _, parameter in pairs})
    if unnamed:
        raise ValueError(
            f"{unnamed} of the optimizer's {len(own)} parameters are not in named_parameters; "
            "pass the named parameters of every module that the optimizer updates"
        )
    members = set(own)
    return {parameter: name for name, parameter in pairs if parameter in members}


def _is_named(pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
    )


def checked_passes(passes: int) -> int:
    """Return a number of backward passes."""
    check_count("backward_passes_per_step", passes)
    return int(passes)


def check_groups(
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    groups: int | list[Any] | None,
) -> None:
    """Check Horovod's arguments for groups of gradients, which buckets do not need."""
    check_group_numbers(num_groups, groups)
    if groups is None or isinstance(groups, int):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    seen: set[int] = set()
    for number, members in enumerate(groups):
        if not isinstance(members, (list, tuple)):
            raise ValueError(
                f"groups[{number}] is a {type(members).__name__}; groups is a list of lists of "
                "parameters"
            )
        for parameter in members:
            if id(parameter) not in own:
                raise ValueError(
                    f"groups[{number}] has a {type(parameter).__name__} that is no parameter of "
                    "the optimizer"
                )
            if id(parameter) in seen:
                raise ValueError(f"groups[{number}] has a parameter that stands in groups twice")
            seen.add(id(parameter))


def next_label(kind: str, process_set: ProcessSet | None) -> str:
    """Return a label that no other exchange of the process set has, the same on all its ranks."""
    numbers = _numbers.setdefault(process_set or global_process_set, itertools.count())
    return f"{kind} {next(numbers)}"


@functools.cache
def average_before_scaling() -> None:
    """Make every GradScaler wait for the exchange before it looks at gradients.

    A scaler decides by the gradients whether a step is taken, and by which factor the next loss is
    scaled. An infinity on one rank is one in the average, so ranks that look at the averages take
    the same decision. Two methods of torch are replaced; for optimizers that are not distributed
    they work as before.
    """
    unscale, step = GradScaler.unscale_, GradScaler.step

    @functools.wraps(unscale)
    def unscale_averages(self: GradScaler, optimizer: Any) -> None:
        if isinstance(optimizer, Wrapped):
            optimizer._prepare_unscaling(self.is_enabled())
        unscale(self, cast(Any, optimizer))

    @functools.wraps(step)
    def step_on_averages(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(optimizer, Wrapped) and self.is_enabled()):
            return step(self, optimizer, *args, **kwargs)
        optimizer._prepare_scaled_step(kwargs.get("batch_size"))
        result = step(self, cast(Any, optimizer), *args, **kwargs)
        optimizer._end_scaled_step()  # the optimizer's hooks are not called if it is skipped
        return result

    GradScaler.unscale_ = unscale_averages  # type: ignore[method-assign]
    GradScaler.step = step_on_averages  # type: ignore[method-assign]
