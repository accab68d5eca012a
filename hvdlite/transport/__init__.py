"""Transports: the collectives of one communicator, each backend behind the same interface."""

from __future__ import annotations

from hvdlite.transport.base import NoRoomError, OnWait, Transport
from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.registry import connect, connect_device

__all__ = [
    "Loopback",
    "MPITransport",
    "NoRoomError",
    "OnWait",
    "Transport",
    "connect",
    "connect_device",
]
