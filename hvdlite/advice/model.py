"""The gradients that a model has, whatever its framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from hvdlite.compression import Parameter


def parameters_of(model: Any) -> list[Parameter]:
    """Describe a model's trainable parameters.

    Args:
        model: with ``named_parameters()``, as PyTorch's have it, or ``trainable_variables``, as
            Keras' and ``tf.Module``; or a mapping of names to arrays, or to anything with shape
            and dtype, or to shapes (of float32).

    Raises:
        TypeError: it is none of these.
        ValueError: it has no parameters.
    """
    parameters = [_described(name, value) for name, value in _named(model)]
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters yet; build it before, by a call "
            "on a batch"
        )
    return parameters


def _named(model: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(model, Mapping):
        return list(model.items())
    if callable(getattr(model, "named_parameters", None)):
        return [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    variables = getattr(model, "trainable_variables", None)
    if variables is not None:
        return [(f"{n}: {getattr(each, 'name', '')}", each) for n, each in enumerate(variables)]
    raise TypeError(
        f"expected a model with named_parameters() or trainable_variables, or a mapping of names "
        f"to shapes; found {type(model).__name__}"
    )


def _described(name: str, value: Any) -> Parameter:
    if isinstance(value, (tuple, list)):
        return Parameter(name, tuple(value), np.dtype(np.float32))
    # "float32", "torch.float32" and "<dtype: 'float32'>" are all in use.
    kind = str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")
    return Parameter(name, tuple(value.shape), np.dtype(getattr(ml_dtypes, kind, kind)))
