"""Broadcast and allgather of Python objects."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvdlite.base.arrays import cut
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.broadcast import checked_root
from hvdlite.engine import Operation, Signature, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.transport import Transport
from hvdlite.world import world


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s object on all ranks.

    Args:
        obj: Object that pickle takes; ignored on the other ranks.
        root_rank: The rank that sends, by its number among all ranks.
        name, process_set: As for `hvdlite.allreduce`.

    Raises:
        ValueError: There is no such rank, or this one is not in the process set.
        HorovodInternalError: The object cannot be pickled (on all ranks), the ranks
            disagree, or communication failed.
    """
    engine = runtime.engine(process_set)
    is_root = False

    def describe(name: str) -> Operation:
        nonlocal is_root  # whose number may be another one when the object has arrived
        root = checked_root(engine, root_rank)
        is_root = world.current().id == root
        content, failure = _pickled(obj) if is_root else (b"", None)
        if is_root and obj is None:
            failure = _nothing_inherited(name, root)
        return BroadcastBytes(name, content, root, failure)

    received = engine.run("broadcast_object", name, describe)
    return obj if is_root else pickle.loads(received)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, by rank.

    Args:
        obj: Object that pickle takes.
        name, process_set: As for `hvdlite.allreduce`.

    Raises:
        HorovodInternalError: An object cannot be pickled (on all ranks), the ranks
            disagree, or communication failed.
    """

    def describe(name: str) -> Operation:
        content, failure = _pickled(obj)
        array = np.frombuffer(content, np.uint8)
        return Allgather(name, array, "allgather of objects", with_rows=True, failure=failure)

    whole, lengths, _ = runtime.engine(process_set).run("allgather_object", name, describe)
    parts = cut(whole, [0, *accumulate(lengths)])
    return [pickle.loads(part.tobytes()) for part in parts]


def _nothing_inherited(name: str, root: int) -> str | None:
    """Return why a root does not send None, if it has taken the number of a rank that has died."""
    number = world.rank()
    if number == root:
        return None
    return (
        f"{name!r}: rank {number} has nothing to send: it is the rank {root} of the start, and has "
        f"taken the place of one that died; ask hvd.rank() when the object is made, and do not "
        "keep it from before"
    )


def _pickled(obj: Any) -> tuple[bytes, str | None]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return b"", f"the {type(obj).__name__} cannot be pickled: {error}"


class BroadcastBytes(Operation):
    """A broadcast of bytes, whose number only the root knows."""

    def __init__(self, name: str, content: bytes, root: int, failure: str | None = None) -> None:
        entries = ("the operation", "broadcast of an object"), ("root_rank", root)
        super().__init__(name, Signature(entries), struct.pack("<q", len(content)), failure)
        self._content = content
        self.root = root

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> bytes:
        root = transport.members.index(self.root)
        (length,) = struct.unpack("<q", payloads[root])
        buffer = np.empty(length, np.uint8)
        if transport.rank == root:
            buffer[...] = np.frombuffer(self._content, np.uint8)
        transport.broadcast(buffer, root)
        return buffer.tobytes()
