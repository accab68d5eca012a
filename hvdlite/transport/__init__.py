"""Transports: the collectives of one communicator, each backend behind the same interface."""

from __future__ import annotations

from hvdlite.transport.base import Patience, Transport
from hvdlite.transport.connect import connect
from hvdlite.transport.loopback import Loopback
from hvdlite.transport.mpi import MPITransport

__all__ = ["Loopback", "MPITransport", "Patience", "Transport", "connect"]
