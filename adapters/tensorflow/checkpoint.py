"""Checkpoints of TensorFlow variables."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from hvdlite.base.arrays import describe
from hvdlite.errors import CheckpointError
from hvdlite.recipe import Checkpoint
from hvdlite.recipe._tree import map_leaves
from hvdlite.tensorflow.functions import flat_variables
from hvdlite.tensorflow.tensors import to_array, to_tensor
from hvdlite.tensorflow.variables import is_variable, name_of
from hvdlite.world import world


class TensorCheckpoint(Checkpoint):
    """A checkpoint whose trees may hold tensors and variables, which are loaded as arrays."""

    def save(self, state: Any, blocking: bool = True) -> None:
        """Write the state of rank 0, as `hvdlite.recipe.Checkpoint.save` does; collective.

        For example ``{"weights": model.variables, "optimizer": optimizer.variables}``.

        Raises:
            RuntimeError: Inside ``tf.function``.
        """
        if tf.inside_function():
            raise RuntimeError("a checkpoint is saved between steps, not inside tf.function")
        super().save(state, blocking)

    def _encode(self, state: Any) -> Any:
        return map_leaves(_to_host, state)


def _to_host(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, tf.Tensor) or is_variable(leaf)
    return to_array(to_tensor(leaf)) if is_tensor else leaf


def checkpoint(path: str | os.PathLike[str], keep: int = 1) -> TensorCheckpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together.

    Args:
        path, keep: As for `hvdlite.checkpoint`.

    Example::

        saved = hvd.checkpoint("digits.npz")
        state = saved.load(default=None)
        if state is not None:
            hvd.assign_variables(model.variables, state["weights"])
        saved.save({"weights": model.variables})
    """
    return TensorCheckpoint(path, keep)


def assign_variables(variables: Any, values: Any) -> None:
    """Overwrite variables with the values of a checkpoint; all of them or, on an error, none.

    Args:
        variables: ``tf.Variable`` or Keras variables, in any nested structure.
        values: As many arrays or tensors, in the same structure.

    Raises:
        CheckpointError: Their number, a shape or a dtype differs; the message names the
            variable.
    """
    flat, arrays = flat_variables(variables), tf.nest.flatten(values)
    if len(flat) != len(arrays):
        raise CheckpointError(
            f"rank {world.rank()}: the checkpoint holds {len(arrays)} values for {len(flat)} "
            "variables; build the model (and the optimizer) as it was when it was saved"
        )
    arrays = [to_array(to_tensor(array)) for array in arrays]
    for number, (variable, array) in enumerate(zip(flat, arrays, strict=True)):
        expected = to_array(to_tensor(variable))
        if describe(expected) != describe(array):
            raise CheckpointError(
                f"rank {world.rank()}: variable {number}, {name_of(variable, number)!r}, is "
                f"{describe(expected)}, and the checkpoint holds {describe(array)} for it; build "
                "the model (and the optimizer) as it was when it was saved"
            )
    for variable, array in zip(flat, arrays, strict=True):
        variable.assign(array)
