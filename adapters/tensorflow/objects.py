"""Any Python object, from one rank or from all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdlite import collectives
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.errors import translated
from hvdlite.tensorflow.tensors import engine


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s object on all ranks; between steps, not in ``tf.function``.

    Args:
        obj: anything that pickle takes; ignored on the other ranks.
        root_rank: the rank whose object counts.
        session: accepted for Horovod's sake, without effect.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such rank.
        MismatchError: the ranks disagree.
        HorovodInternalError: the object cannot be pickled (on all ranks), or communication
            failed.
        RuntimeError: inside ``tf.function``, which would do it when it is traced only.
    """
    _check(process_set)
    return translated(collectives.broadcast_object)(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that does what `broadcast_object` does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, by rank; between steps, not in ``tf.function``.

    Args:
        obj: anything that pickle takes.
        session: accepted for Horovod's sake, without effect.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: an object cannot be pickled (on all ranks), or communication
            failed.
        RuntimeError: inside ``tf.function``, which would do it when it is traced only.
    """
    _check(process_set)
    return translated(collectives.allgather_object)(obj, name, process_set)


def _check(process_set: ProcessSet) -> None:
    if tf.inside_function():
        raise RuntimeError(
            "objects are exchanged between steps, not inside tf.function, which would do it once, "
            "when it is traced; exchange tensors there"
        )
    engine(process_set)
