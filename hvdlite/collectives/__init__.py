"""Collectives on numpy arrays, device arrays and objects: one file per family of operations.

A file holds all about its operation: the public calls, the checks and the description
(``describe_...``), and the class that carries it out, wherever arrays lie (``arrays.py``). There is
one way to submit: ``engine.run(kind, name, describe)``, or ``engine.submit(...)`` for a handle,
where ``describe(name)`` makes the operation. The adapters call the same ``describe_...`` functions.
"""

from __future__ import annotations

from hvdlite.collectives.allgather import allgather, allgather_async
from hvdlite.collectives.allgather import describe_allgather as describe_allgather
from hvdlite.collectives.allreduce import allreduce, allreduce_async
from hvdlite.collectives.allreduce import describe_allreduce as describe_allreduce
from hvdlite.collectives.alltoall import Route as Route
from hvdlite.collectives.alltoall import alltoall, alltoall_async
from hvdlite.collectives.alltoall import describe_alltoall as describe_alltoall
from hvdlite.collectives.alltoall import run_alltoall as run_alltoall
from hvdlite.collectives.barrier import agree_on as agree_on
from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.broadcast import broadcast, broadcast_async
from hvdlite.collectives.broadcast import checked_root as checked_root
from hvdlite.collectives.broadcast import describe_broadcast as describe_broadcast
from hvdlite.collectives.groups import describe_group as describe_group
from hvdlite.collectives.groups import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from hvdlite.collectives.join import join
from hvdlite.collectives.objects import allgather_object, broadcast_object
from hvdlite.collectives.reducescatter import describe_reducescatter as describe_reducescatter
from hvdlite.collectives.reducescatter import reducescatter, reducescatter_async
from hvdlite.engine import poll, synchronize

# The public names of `hvdlite`.
__all__ = [
    "allreduce",
    "allreduce_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "broadcast",
    "broadcast_async",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "broadcast_object",
    "allgather_object",
    "join",
    "barrier",
    "poll",
    "synchronize",
]
