"""Transports: the collectives of one set of ranks, each backend behind the same interface.

Jobs import the backends (``registry.py``), programs that only import hvdlite do not.
"""

from __future__ import annotations

from hvdlite.transport.transport import NoRoomError, OnWait, Transport

__all__ = ["NoRoomError", "OnWait", "Transport"]
