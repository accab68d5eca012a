"""The comparison across ranks of an optimizer of any Keras, or of ``tf.compat.v1.train``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite import gradients


def describe_optimizer(reference: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Return the class and the options of an optimizer, with the configuration of schedules.

    Args:
        reference: returns the optimizer; None: it is no more.
    """
    optimizer = reference()
    if optimizer is None:
        return []
    # Of a distributed one, `__class__` is the class without hvdlite.
    return gradients.describe_optimizer(optimizer.__class__.__name__, _options(optimizer))


def _options(optimizer: Any) -> dict[str, Any]:
    if hasattr(optimizer, "get_config"):
        try:
            return dict(optimizer.get_config())
        except Exception:  # a class of the user's own need not have it
            return {}
    attributes = {name.lstrip("_"): value for name, value in vars(optimizer).items()}
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, float) or (isinstance(value, bool) and name != "use_locking")
    }
