"""The same variables on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import collectives, runtime
from hvdlite.arrays import describe


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of any Keras; none where there is no optimizer."""
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite variables with those of rank ``root_rank``.

    Raises:
        ValueError: there is no such rank.
        HorovodInternalError: the ranks disagree on names, shapes or dtypes.
    """
    engine = runtime.engine()
    prefix = engine.unnamed("broadcast_variables")
    collectives.checked_root(engine, root_rank)  # at once: what follows waits for the others
    arrays = [to_array(variable) for variable in variables]
    names = [getattr(variable, "path", None) or variable.name for variable in variables]
    layout = [(name, describe(array)) for name, array in zip(names, arrays, strict=True)]
    collectives.agree_on(f"{prefix}: its variables", layout)
    handles = [
        collectives.broadcast_async(array, root_rank, f"{prefix}: {number} {name}")
        for number, (name, array) in enumerate(zip(names, arrays, strict=True))
    ]
    for variable, handle in zip(variables, handles, strict=True):
        variable.assign(handle.wait())


def to_array(value: Any) -> Any:
    """A number, an array, a tensor or a variable as a numpy array, on the host."""
    inner = getattr(value, "value", None)
    if inner is not None and not callable(inner):  # a Keras variable
        return to_array(inner)
    if hasattr(value, "detach"):  # PyTorch's, which may be bfloat16, and on a device
        from hvdlite.torch.tensors import to_array as torch_to_array

        return torch_to_array(value.detach())
    return np.asarray(value)
