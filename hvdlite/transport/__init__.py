"""Transports: the collectives of one communicator, each backend behind the same interface."""

from __future__ import annotations

from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.registry import connect, connect_device
from hvdlite.transport.transport import NoRoomError, OnWait, Transport

__all__ = [
    "Loopback",
    "MPITransport",
    "NoRoomError",
    "OnWait",
    "Transport",
    "connect",
    "connect_device",
]
