"""The registry of transports, and the choice of one for a world and for its devices."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from hvdlite.errors import HorovodInternalError
from hvdlite.transport.gpu import nccl
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.transport.gpu.cuda import Cuda
from hvdlite.transport.hierarchical import HierarchicalTransport
from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport, join_nodes
from hvdlite.transport.transport import Transport
from hvdlite.world.world import World

#: The transports of host arrays, best first; `connect` takes the first that suits the ranks. This
#: is the only registration.
TRANSPORTS: tuple[type[Transport], ...] = (
    Loopback,
    SharedMemoryTransport,
    HierarchicalTransport,
    MPITransport,
)
_log = logging.getLogger("hvdlite")
# From this version on NCCL lets ranks share a device, if it is told to by this variable.
_SHARING_VERSION, _SHARING = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"


def connect(
    MPI: Any,  # noqa: N803
    world: World,
    shared_memory: bool = True,
    before: Transport | None = None,
) -> Transport:
    """Return the best transport for a world's ranks; collective.

    Args:
        world: the ranks and their nodes; the transport makes communicators of its own.
        shared_memory: whether it may be used; the same on all ranks.
        before: the transport that these ranks, and some that have died, used before. The new one
            exchanges the arrays that `Transport.empty` has returned there as fast as its own.
    """
    barrier = None
    if shared_memory and len(set(world.nodes)) < world.comm.size:
        barrier = join_nodes(world, getattr(before, "barrier", None))
    made = (kind.connect(MPI, world, barrier) for kind in TRANSPORTS)
    transport = next(each for each in made if each is not None)
    transport.members = world.ids
    return transport


def connect_device(
    control: Transport,
    device: int,
    cuda: Cuda,
    timeout: float = 60.0,
    through_host: bool = False,
) -> DeviceTransport:
    """Return the best transport for arrays on this rank's device; collective.

    It is NCCL's where all ranks have the same version of it, and each a device of its own;
    otherwise one that goes through the host, on all ranks, and rank 0 logs a warning, unless
    ``through_host`` asks for it.

    Args:
        control: the host transport of the same ranks, called in the thread that uses it.
        cuda: the devices of this process.
        timeout: seconds after which work that the host waits for has failed.
        through_host: leave NCCL out; the same on all ranks.

    Raises:
        HorovodInternalError: a rank cannot use its device; on all ranks.
    """
    try:
        version = cuda.nccl_version()
        facts: dict[str, Any] = {
            "rank": control.members[control.rank],
            "nccl": version,
            "host": _host(),
            "device": cuda.bus_id(device),
            "sharing": version >= _SHARING_VERSION and os.environ.get(_SHARING) == "1",
        }
    except Exception as error:
        facts = {"error": str(error)}
    everywhere = control.gather_objects(facts)
    for rank, theirs in zip(control.members, everywhere, strict=False):
        if "error" in theirs:
            raise HorovodInternalError(
                f"rank {rank} cannot use its device: {theirs['error']}; arrays on devices need "
                "cupy on all ranks (pip install 'hvdlite[cuda13]')"
            )
    if not through_host:
        objection = nccl.find_objection(everywhere)
        if objection is None:
            communicator, objection = nccl.join(control, device, cuda)
        if objection is None:
            return nccl.NCCLTransport(cuda, control, device, communicator, timeout)
        if control.rank == 0:
            _log.warning("device arrays go through host memory, which is slower: %s", objection)
    return DeviceTransport(cuda, control, device, timeout)


def _host() -> str:
    """Return an identifier of this host, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
