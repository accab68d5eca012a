"""What variables are called in messages and in agreements between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def name_of(variable: Any, number: int) -> str:
    """The path of a Keras variable, the name of a ``tf.Variable``, or the number of a tensor."""
    path = getattr(variable, "path", None)
    if isinstance(path, str):
        return path
    if isinstance(variable, tf.Variable):
        return variable.name.removesuffix(":0")
    return f"tensor {number}"


def unique_names(variables: Sequence[Any]) -> list[str]:
    """Names, where those that are repeated get a number: ``w``, ``w#1``, ``w#2``."""
    seen: Counter[str] = Counter()
    names = []
    for number, variable in enumerate(variables):
        name = name_of(variable, number)
        names.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names
