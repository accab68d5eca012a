"""What all optimizers have in common that `DistributedOptimizer` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from hvdlite.arguments import check_count
from hvdlite.compression import check_groups as check_group_numbers
from hvdlite.horovod import answers

#: Where an optimizer's state dict has what is hvdlite's.
STATE = "hvdlite"


class Wrapped:
    """What `DistributedOptimizer` adds to every optimizer's class."""

    _parameter_names: dict[torch.Tensor, str]
    param_groups: list[dict[str, Any]]

    def _trainable(self) -> list[torch.Tensor]:
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def _prepare_unscaling(self, enabled: bool) -> None:
        """Get ready for a GradScaler that unscales gradients, or that would if it were enabled."""

    def _prepare_scaled_step(self, batch_size: int | None) -> None:
        """Get ready for a GradScaler that decides whether there is a step."""

    def _end_scaled_step(self) -> None:
        """End a step that a GradScaler has taken, or left out."""

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
    """Refuse what cannot be wrapped.

    Raises:
        TypeError: it is no torch optimizer, or one without torch's step hooks.
        ValueError: it is wrapped already.
    """
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
    """Let an optimizer be of a subclass, of the same name, that has the addition's methods."""
    kind = type(optimizer)
    # Under the alias as in Horovod: there are programs that look for its name in the class's.
    module = "horovod.torch.optimizer" if answers("horovod.torch") else kind.__module__
    optimizer.__class__ = type(kind.__name__, (addition, kind), {"__module__": module})
    return optimizer


def names_of(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """Names by parameter, in the order of registration.

    Raises:
        ValueError: they are malformed, one occurs twice, or a parameter has none.
    """
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
    """Return a number of backward passes.

    Raises:
        ValueError: it is no integer, or below 1.
    """
    check_count("backward_passes_per_step", passes)
    return int(passes)


def check_groups(
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
) -> None:
    """Check Horovod's ways to group gradients, which buckets have no need of.

    Raises:
        ValueError: a number is negative, or ``groups`` is something else than a number or lists
            of the optimizer's parameters, each once.
    """
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
