"""How bytes meet: one class for each way, behind one interface."""

from __future__ import annotations

from hvdlite.transport.base import Patience, Transport
from hvdlite.transport.connect import connect
from hvdlite.transport.counting import CountingTransport
from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport

__all__ = [
    "CountingTransport",
    "Loopback",
    "MPITransport",
    "Patience",
    "Transport",
    "connect",
]
