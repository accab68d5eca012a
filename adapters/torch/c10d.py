"""Changes of torch.distributed for the backend."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from hvdlite import collectives
from hvdlite.engine import runtime
from hvdlite.errors import HorovodInternalError, ranks_text
from hvdlite.torch.dynamo import untraced
from hvdlite.world import world

#: The backend's name.
NAME = "hvdlite"
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")


def install() -> None:
    """Have torch find the ranks by MPI, and groups of this backend have a monitored barrier."""
    _rendezvous._rendezvous_handlers["env"] = _find_ranks
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def substitute() -> None:
    """Have groups that ask for gloo, for mpi or for nothing be groups of this backend.

    Where there is an accelerator, those that ask for nothing stay torch's.
    """
    c10d.BackendConfig = _Substitutes  # type: ignore[misc]


class _Substitutes(c10d.BackendConfig):
    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        found = {*self.device_backend_map.values()}
        is_open = str(backend) == "undefined" and not torch.accelerator.is_available()
        if is_open or found <= {"gloo", "mpi"}:
            self.device_backend_map = dict.fromkeys(self.device_backend_map, dist.Backend(NAME))


_SHORTEST = timedelta(milliseconds=1)  # to a store, 0 is for ever
_by_environment = _rendezvous._rendezvous_handlers["env"]
_of_gloo = c10d.monitored_barrier


def _find_ranks(url: str, timeout: timedelta = c10d.default_pg_timeout, **options: Any) -> Any:
    """Find the ranks as torch does, where the environment names them, or else by MPI."""
    if "RANK" in os.environ or "rank=" in url:
        yield from _by_environment(url, timeout=timeout, **options)
        return
    runtime.init()
    rank, size, is_local = world.rank(), world.size(), world.local_size() == world.size()
    host = "127.0.0.1" if is_local else socket.gethostname()
    store = TCPStore(host, 0, size, True, timeout, False) if rank == 0 else None
    host, port = collectives.broadcast_object((host, store.port) if store else None, 0)
    yield store or TCPStore(host, port, size, False, timeout), rank, size


def counted(call: Callable[..., Any]) -> Any:
    """Count a call before anything can be refused: an error of one rank shifts no later call.

    A profile shows it until its end.
    """

    @wraps(call)
    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        self.check_open()
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return call(self, *arguments, **named)
        title = f"{NAME}:{call.__name__.strip('_')}"
        with torch.profiler.record_function(title) as event:
            work = call(self, *arguments, **named)
            event._call_end_callbacks_on_future(work.get_future())
        return work

    return untraced(counted)


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    """Wait for all ranks, over the store; the first one finds those that do not come.

    Groups of other backends do what torch has for them, which asks for gloo by its name.

    Raises:
        HorovodInternalError: On all ranks, in gloo's words; some have not come in time.
    """
    found: Any = c10d._get_default_group() if group is None else group
    if getattr(found, "name", str)() != NAME:
        return _of_gloo(group, timeout, wait_all_ranks)
    found.check_open()
    seconds = getattr(timeout, "total_seconds", lambda: timeout or found.timeout)()
    rank, ids, store = found.rank(), found.engine.world.ids, found.store
    found.barriers += 1
    key, within = f"monitored_barrier {found.barriers}", f"in {1e3 * seconds:g} ms"
    if rank:
        store.set(f"{key} {rank}", "")
        error = f"nothing came {within}"
        if _has_come(store, key, seconds * (len(ids) if wait_all_ranks else 2)):
            error = store.get(key).decode()
        if error:
            error = (
                f"Rank {ids[rank]} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank {ids[0]}: {error}"
            )
    else:
        late: list[int] = []
        for other in range(1, len(ids)):
            is_over = late and not wait_all_ranks
            if not is_over and not _has_come(store, f"{key} {other}", seconds):
                late.append(ids[other])
        who = ranks_text(late).capitalize()
        error = f"{who} failed to pass monitoredBarrier {within}" if late else ""
        store.set(key, error)
    if error:
        raise HorovodInternalError(f"rank {ids[rank]}{found.label}: {error}")
    return None


def _has_come(store: Any, key: str, seconds: float) -> bool:
    """Return whether a key is there, or comes in time."""
    try:
        store.wait([key], timedelta(seconds=seconds) or _SHORTEST)
    except RuntimeError:
        return False
    return True
