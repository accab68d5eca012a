"""Models whose training step has to exchange gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hvdlite._keras.distributed import Distributed


def distributed_part(optimizer: Any) -> Any:
    """The optimizer, or one that it consists of, which is distributed; None: there is none."""
    if isinstance(optimizer, Distributed):
        return optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return distributed_part(inner)
    parts = getattr(optimizer, "optimizers", None) or ()
    return next((part for part in map(distributed_part, parts) if part is not None), None)


def keep_local(optimizer: Any, layers: Any) -> Any:
    """Let the gradients of some layers stay with their rank; return the optimizer."""
    distributed_part(optimizer)._hvdlite.keep_local(layers=layers)
    return optimizer


def exchanging(
    make: Callable[..., Any], around: Callable[[Any], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Make of a model's ``make_train_function`` one that knows of distributed optimizers.

    A step that was compiled before the optimizer became distributed would exchange nothing, so
    it is compiled again.

    Args:
        make: the method.
        around: what a model's step has to be made in.
    """

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        part = distributed_part(self.optimizer)
        if part is None:
            return make(self, force=force)
        made = part._hvdlite.train_functions
        known = self.train_function is not None and self.train_function in made
        with around(self):
            result = make(self, force=force or not known)
        made.add(self.train_function)
        return result

    return make_train_function


# Of optimizers: all that they have, and what they train.
_OTHER_LISTS = {"_variables", "_trainable_variables"}


def moments_in(
    attributes: Mapping[str, Any], index: int, size: int, fits: Callable[[Any], bool]
) -> dict[str, Any]:
    """Find what an optimizer keeps for one of its variables: Keras has lists of that.

    Args:
        attributes: of the optimizer.
        index: of the variable.
        size: how many variables there are.
        fits: whether something is of the variable's kind.

    Returns:
        By the name of the list.
    """
    return {
        name: kept[index]
        for name, kept in attributes.items()
        if name not in _OTHER_LISTS
        and isinstance(kept, list)
        and len(kept) == size
        and fits(kept[index])
    }
