"""Ranks and sizes as tensors, evaluated each time that a graph runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.tensorflow.tensors import engine, run, unconverted
from hvdlite.world import world

__all__ = ["rank_op", "size_op", "local_rank_op", "local_size_op", "process_set_included_op"]


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank as an int32 tensor; ``name`` has no effect, here and below."""
    return integer(world.rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in a process set as an int32 tensor.

    Args:
        process_set_id: The number of the set; 0 is the set of all ranks.
        name: Accepted as in Horovod, without effect.

    Raises:
        ValueError: There is no such set; out of a graph, when it runs.
    """
    return integer(lambda: len(runtime.process_sets().find(process_set_id).ranks or ()))


def set_size(process_set: ProcessSet) -> tf.Tensor:
    """Return the number of ranks in a process set of this rank, as an int32 tensor."""
    return integer(lambda: engine(process_set).size)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the local rank as an int32 tensor."""
    return integer(world.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this node as an int32 tensor."""
    return integer(world.local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return whether this rank belongs to a process set, as an int32 tensor: 1 or 0.

    Args:
        process_set_id, name: As for `size_op`, with its error.
    """
    return integer(lambda: bool(runtime.process_sets().find(process_set_id).included()))


@unconverted
def integer(count: Callable[[], int], process_set: ProcessSet | None = None) -> tf.Tensor:
    """Return what a function returns; ``process_set`` has the ranks that call it, None: any."""
    (result,) = run(lambda: [np.int32(count())], [], [tf.TensorSpec((), tf.int32)], process_set)
    return result
