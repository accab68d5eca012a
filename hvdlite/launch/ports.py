"""The ports of mpirun, closed to everybody else.

The manager of Open MPI 5 listens on all interfaces, for managers on other hosts, and refuses to do
so on the loopback alone (ompi issue 14441). It waits without limit for the rest of what anybody
who connects begins to send, and meanwhile the job neither prints nor ends. So does its PMIx, to
which the ranks connect on the loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct

# Numbers of system calls, of which many a Python lacks the first, and of socket options.
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_SO_ATTACH_FILTER, _IP_MINTTL, _IPV6_MINHOPCOUNT = 26, 21, 73
# A filter of one instruction, which returns 0: the system drops the packet.
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)


def close(pid: int, to_this_host: bool = False) -> None:
    """Have the system drop what arrives at a child's TCP ports; on the loopback `to_this_host`.

    The process notices nothing. Where the system does not allow to look into it (a container
    without CAP_SYS_PTRACE), its ports stay open.
    """
    system = ctypes.CDLL(None)
    process = system.syscall(_PIDFD_OPEN, pid, 0)
    # It may have ended.
    with contextlib.suppress(OSError, ValueError), open(process, "rb", buffering=0):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # a file that it has closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    file = system.syscall(_PIDFD_GETFD, process, int(name), 0)
                    if file >= 0:
                        with socket.socket(fileno=file) as found:
                            _close(found, to_this_host)


def _close(found: socket.socket, to_this_host: bool) -> None:
    """Have the system drop what arrives at a port, or at least all that was not made to pass.

    Some kernels (6.18.44) allow filters of TCP only with CAP_NET_ADMIN. A packet begins with 64
    hops left, unless its program sets another number, of which 255 is the highest.
    """
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
    if not is_tcp or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return
    address = ipaddress.ip_address(found.getsockname()[0].partition("%")[0])
    if address.is_loopback and not to_this_host:
        return
    instruction = ctypes.create_string_buffer(_DROP)
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    try:
        found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except PermissionError:
        found.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, 255)
        if found.family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, 255)
