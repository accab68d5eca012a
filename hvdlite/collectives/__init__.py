"""Collectives on numpy arrays, device arrays and objects: one file per family of operations.

A file holds all about its operation: the public calls, the checks and the description
(``describe_...``), and the class that carries it out, wherever arrays lie (``arrays.py``). There is
one way to submit: ``engine.run(kind, name, describe)``, or ``engine.submit(...)`` for a handle,
where ``describe(name)`` makes the operation. The adapters call the same ``describe_...`` functions.
"""

from __future__ import annotations

from hvdlite.collectives.allgather import allgather, allgather_async, describe_allgather
from hvdlite.collectives.allreduce import allreduce, allreduce_async, describe_allreduce
from hvdlite.collectives.alltoall import (
    Route,
    alltoall,
    alltoall_async,
    describe_alltoall,
    run_alltoall,
)
from hvdlite.collectives.barrier import agree_on, barrier
from hvdlite.collectives.broadcast import (
    broadcast,
    broadcast_async,
    checked_root,
    describe_broadcast,
)
from hvdlite.collectives.groups import (
    describe_group,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from hvdlite.collectives.join import join
from hvdlite.collectives.objects import allgather_object, broadcast_object
from hvdlite.collectives.reducescatter import (
    describe_reducescatter,
    reducescatter,
    reducescatter_async,
)
from hvdlite.engine import poll, synchronize

__all__ = [
    "Route",
    "agree_on",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "checked_root",
    "describe_allgather",
    "describe_allreduce",
    "describe_alltoall",
    "describe_broadcast",
    "describe_group",
    "describe_reducescatter",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "run_alltoall",
    "synchronize",
]
