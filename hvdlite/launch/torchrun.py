"""The variables that torchrun sets, for ``hvdliterun --torch``.

The launcher sets those that all ranks share, and the process around each rank its own.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from hvdlite.observe.protocol import first_of, rank_here

if TYPE_CHECKING:
    from hvdlite.launch.hosts import Host

NODES = "HVDLITE_LAUNCH_NODES"
"""The environment variable with the first rank on each node; empty: nodes have equal numbers."""
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def shared(hosts: Sequence[Host], is_here: bool, starts: int, restarts: int) -> dict[str, str]:
    """Return the variables that all ranks of a run of a `Job` share.

    ``starts`` counts the runs before, ``restarts`` those that may follow after failures.
    """
    from hvdlite.launch.hosts import host_key  # which the process around a rank need not load

    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host_key(host.name)] += host.slots
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return {
        NODES: ",".join(map(str, [0, *accumulate(slots.values())][:-1])),
        "MASTER_ADDR": "127.0.0.1" if is_here else _first(hosts),
        "MASTER_PORT": str(port),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
    }


def _first(hosts: Sequence[Host]) -> str:
    """Return the address of the host of rank 0, as the others reach it."""
    from hvdlite.launch.hosts import all_local, own_addresses

    if hosts and not all_local(hosts[:1]):
        return hosts[0].name
    others = [host for host in hosts if not all_local([host])]
    # A Slurm job that is started on a login node: node[07-09,12] begins with node07.
    nodes = "" if hosts else os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+).*", r"\1", nodes.partition(",")[0])
    return first or next(iter(own_addresses(others)), socket.gethostname())


def own(size: int, manager: int) -> dict[str, str]:
    """Return this rank's variables, in a job of so many processes.

    The manager is the process that has started those of this node.
    """
    rank = rank_here()
    local_rank, local_size = int(first_of(_LOCAL_RANK, "0")), int(first_of(_LOCAL_SIZE, "1"))
    firsts = [int(each) for each in os.environ[NODES].split(",") if each]
    firsts = [each for each in firsts or range(0, size, local_size) if each < size]
    ranks = size - int(os.environ.get("HVDLITE_SPARES", "0"))
    # Of the node, or of a part to which mpirun has bound the rank.
    cores, bound = (len(os.sched_getaffinity(process)) for process in (manager, 0))
    found = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": sum(each <= rank - local_rank for each in firsts) - 1,
        "GROUP_WORLD_SIZE": len(firsts),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
        or max(1, min(cores // local_size, bound)),
    }
    return {name: str(value) for name, value in found.items()}
