"""The options and variables of a Keras optimizer that ranks compare; imports no Keras."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.gradients.replicas import describe_optimizer, state_label

_PLAIN = (bool, int, float, str)


class OptimizerReplica:
    """An optimizer's options, and the variables that it keeps for weights.

    Args:
        optimizer: The optimizer; only a weak reference is kept. None: there is none.

    Attributes:
        uncompared: The number of exchanges before ranks compare their replicas, more than one if
            the variables are broadcast later.
        read: Returns the number that a variable has; a framework may have a faster one.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self.uncompared = 1
        self.read: Callable[[Any], float] = lambda variable: variable.numpy().item()
        self._config: dict[str, Any] | None = None

    def options(self) -> list[tuple[str, Any]]:
        """Return the class and the options, the rate as it is now; of schedules the steps."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        if self._config is None:
            self._config = _config_of(optimizer)
        current = {
            name: self.read(value) if hasattr(value, "assign") else value
            for name, value in self._changing(optimizer).items()
        }
        # For a distributed optimizer, `__class__` is the class without hvdlite.
        return describe_optimizer(optimizer.__class__.__name__, {**self._config, **current})

    def option_variables(self) -> list[Any]:
        """Return the variables among the options, such as the rate."""
        optimizer = self._optimizer()
        changing = {} if optimizer is None else self._changing(optimizer)
        return [value for value in changing.values() if hasattr(value, "assign")]

    def _changing(self, optimizer: Any) -> dict[str, Any]:
        """Return the options that may change, values or variables, and the steps of a schedule."""
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # which has the rate
        attributes = vars(optimizer)
        attributes = attributes.get("_hyper", attributes)  # of the older legacy optimizers
        found = {}
        for name in (*(self._config or ()), "learning_rate"):
            value = attributes.get(name, attributes.get(f"_{name}"))
            if isinstance(value, _PLAIN) or hasattr(value, "assign"):
                found[name] = value
            elif name == "learning_rate" and callable(value):
                found["iterations"] = optimizer.iterations
        return found

    def trained(self) -> list[Any]:
        """Return the weights that the optimizer was built for; none before, or if it is legacy."""
        return [*getattr(self._optimizer(), "_trainable_variables", ())]

    def moments_of(self, variable: Any) -> dict[str, Any]:
        """Return what the optimizer keeps of a variable's shape for it, by name."""
        optimizer = self._optimizer()
        kept = {} if optimizer is None else optimizer._kept_for(variable)
        return {name: each for name, each in kept.items() if each.shape == variable.shape}

    def state(self, weights: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Return pairs of a label and a variable: all that the optimizer keeps for some weights."""
        optimizer = self._optimizer()
        if optimizer is None or not hasattr(optimizer, "_kept_for"):
            return []
        found = [
            (state_label(key.strip("_"), name), kept)
            for name, weight in weights
            for key, kept in optimizer._kept_for(weight).items()
            if "accumulated" not in key  # this rank's own gradients
        ]
        others = {id(each) for kept in optimizer._kept() for each in kept.values()}
        common = [
            each
            for each in variables_of(optimizer)
            if id(each) not in others and "learning_rate" not in each.name  # which is an option
        ]
        # Without the optimizer's name, which may differ between ranks.
        own = getattr(optimizer, "name", None) or getattr(optimizer, "_name", "")
        names = unique(str(v.name).removesuffix(":0").removeprefix(f"{own}/") for v in common)
        pairs = zip(names, common, strict=True)
        return [*found, *((state_label(name), kept) for name, kept in pairs)]


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of any Keras; none if there is no optimizer."""
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def unique(names: Iterable[str]) -> list[str]:
    """Return names with the repeated ones numbered: ``w``, ``w#1``, ``w#2``."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        result.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return result


def _config_of(optimizer: Any) -> dict[str, Any]:
    if hasattr(optimizer, "get_config"):
        try:
            return dict(optimizer.get_config())
        except Exception:  # user-defined classes may lack it
            return {}
    attributes = {name.lstrip("_"): value for name, value in vars(optimizer).items()}
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, float) or (isinstance(value, bool) and name != "use_locking")
    }
