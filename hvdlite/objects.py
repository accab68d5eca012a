"""The collectives on Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from hvdlite import runtime, world
from hvdlite.collectives import checked_root
from hvdlite.engine.operations import Allgather, BroadcastBytes
from hvdlite.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s object on all ranks.

    Args:
        obj: anything that pickle takes; ignored on the other ranks.
        root_rank: the rank whose object counts, by its number among all ranks.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such rank, or this one is not in the process set.
        HorovodInternalError: the object cannot be pickled (on all ranks), the ranks
            disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("broadcast_object")
    root = checked_root(engine, root_rank)
    content, failure = _pickled(obj) if world.rank() == root else (b"", None)
    received = engine.named.run(BroadcastBytes(name, content, root, failure))
    return obj if world.rank() == root else pickle.loads(received)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, by rank.

    Args:
        obj: anything that pickle takes.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: an object cannot be pickled (on all ranks), the ranks
            disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("allgather_object")
    content, failure = _pickled(obj)
    flat = np.frombuffer(content, np.uint8)
    operation = Allgather(name, flat, "allgather of objects", with_rows=True)
    operation.failure = failure
    whole, lengths = engine.named.run(operation)
    ends = np.cumsum(lengths)
    return [
        pickle.loads(whole[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def _pickled(obj: Any) -> tuple[bytes, str | None]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return b"", f"the {type(obj).__name__} cannot be pickled: {error}"
