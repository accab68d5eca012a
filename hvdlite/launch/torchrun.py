"""The variables that torchrun sets, for ``hvdliterun --torch``, as far as all ranks share them.

The process around each rank sets its own (`hvdlite.launch.rank.torch_variables`).
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from hvdlite.launch.hosts import Host, all_local, host_key, own_addresses
from hvdlite.launch.rank import NODES


def shared(hosts: Sequence[Host], is_here: bool, starts: int, restarts: int) -> dict[str, str]:
    """Return the variables that all ranks of a run of a `Job` share.

    ``starts`` counts the runs before, ``restarts`` those that may follow after failures.
    """
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
    if hosts and not all_local(hosts[:1]):
        return hosts[0].name
    others = [host for host in hosts if not all_local([host])]
    # A Slurm job that is started on a login node: node[07-09,12] begins with node07.
    nodes = "" if hosts else os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+).*", r"\1", nodes.partition(",")[0])
    return first or next(iter(own_addresses(others)), socket.gethostname())
