"""The same state on every rank, and on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import CheckpointError, collectives, world
from hvdlite.arrays import describe
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.recipe import Checkpoint
from hvdlite.recipe._tree import map_leaves
from hvdlite.tensorflow.graphs import for_session
from hvdlite.tensorflow.tensors import as_it_is, engine, like, run, to_array, to_tensor
from hvdlite.tensorflow.variables import name_of

_log = logging.getLogger("hvdlite")


def broadcast_variables(
    variables: Any,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables with those of rank ``root_rank``.

    Build the model before (call it once, or ``model.build``): until then it has none. The
    same holds for a Keras optimizer (``optimizer.build(model.trainable_variables)``).

    Args:
        variables: ``tf.Variable`` or Keras variables of any dtype, in any nested structure;
            e.g. ``model.variables`` or ``optimizer.variables``.
        root_rank: the rank whose values count.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake: variables stay the same objects in any case.

    Returns:
        In a graph for a ``tf.compat.v1.Session`` the operation that does it; otherwise None: it is
        done, or ``tf.function`` does it.

    Raises:
        TypeError: one of them is no variable.
        ValueError: there is no such rank.
        MismatchError: the ranks disagree on names, shapes or dtypes.
        HorovodInternalError: communication failed.
    """
    values = broadcast_(variables, root_rank, process_set=process_set)
    return tf.group(values) if for_session() else None


@as_it_is
def broadcast_(
    variables: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite variables with those of rank ``root_rank``, and return their values.

    Args:
        variables: as `broadcast_variables`, and it raises the same.
        root_rank: the rank whose values count.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Returns:
        The values, in the order of ``tf.nest.flatten(variables)``. The variables have them when
        these exist, in a graph for a ``tf.compat.v1.Session`` too.
    """
    flat = _flat_variables(variables)
    names = [name_of(variable, number) for number, variable in enumerate(flat)]

    def spread(*arrays: Any) -> list[Any]:
        prefix = name or engine(process_set).unnamed("broadcast_variables")
        collectives.checked_root(
            engine(process_set), root_rank
        )  # at once: what follows waits for the others
        layout = [(of, describe(np.asarray(a))) for of, a in zip(names, arrays, strict=True)]
        collectives.agree_on(f"{prefix}: its variables", layout, process_set)
        handles = [
            collectives.broadcast_async(
                array, root_rank, f"{prefix}: {number} {of}", process_set=process_set
            )
            for number, (of, array) in enumerate(zip(names, arrays, strict=True))
        ]
        return [handle.wait() for handle in handles]

    tensors = [to_tensor(variable) for variable in flat]
    values = run(spread, tensors, list(map(like, tensors)), process_set)
    assigned = [variable.assign(value) for variable, value in zip(flat, values, strict=True)]
    if not for_session():
        return values
    with tf.control_dependencies([tf.group(assigned)]):
        return [tf.identity(value) for value in values]


def _flat_variables(variables: Any) -> list[Any]:
    flat = tf.nest.flatten(list(variables) if isinstance(variables, Iterator) else variables)
    for variable in flat:
        if not _is_variable(variable):
            raise TypeError(f"expected variables of TensorFlow or Keras, found {variable!r}")
    if not flat:
        _log.warning(
            "rank %d: there are no variables to broadcast; a model has none before it is built",
            world.rank(),
        )
    return flat


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "dtype")


class TensorCheckpoint(Checkpoint):
    """A checkpoint whose trees may hold tensors and variables; they come back as arrays."""

    def save(self, state: Any) -> None:
        """Write the state of rank 0, in place of what the file held before; collective.

        Args:
            state: as `hvdlite.recipe.Checkpoint.save`, with tensors and variables; e.g.
                ``{"weights": model.variables, "optimizer": optimizer.variables}``.

        Raises:
            TypeError: something else is in the tree.
            CheckpointError: the file cannot be written.
            RuntimeError: inside ``tf.function``.
        """
        if tf.inside_function():
            raise RuntimeError("a checkpoint is saved between steps, not inside tf.function")
        super().save(state)

    def _encode(self, state: Any) -> Any:
        return map_leaves(_to_host, state)


def _to_host(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, tf.Tensor) or _is_variable(leaf)
    return to_array(to_tensor(leaf)) if is_tensor else leaf


def checkpoint(path: str | os.PathLike[str]) -> TensorCheckpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together.

    Example::

        saved = hvd.checkpoint("digits.npz")
        state = saved.load(default=None)
        if state is not None:
            hvd.assign_variables(model.variables, state["weights"])
        saved.save({"weights": model.variables})
    """
    return TensorCheckpoint(path)


def assign_variables(variables: Any, values: Any) -> None:
    """Overwrite variables with what a checkpoint held; all of them or, on an error, none.

    Args:
        variables: ``tf.Variable`` or Keras variables, in any nested structure.
        values: as many arrays or tensors, in the same structure.

    Raises:
        CheckpointError: their number, a shape or a dtype differs; the message names the
            variable.
    """
    flat, arrays = _flat_variables(variables), tf.nest.flatten(values)
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
