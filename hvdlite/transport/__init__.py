"""Transports: the collectives of one set of ranks, each backend behind the same interface.

`connect` in ``registry.py`` chooses the backend of a world, and only then imports it.
"""

from __future__ import annotations

from hvdlite.transport.transport import NoRoomError, OnWait, Transport

__all__ = ["NoRoomError", "OnWait", "Transport"]
