"""Training that goes on after a failure: a state that is kept, and a loop that returns to it."""

from __future__ import annotations

from hvdlite.elastic.objects import ObjectState
from hvdlite.elastic.run import run
from hvdlite.elastic.state import HostUpdate, State

__all__ = ["HostUpdate", "ObjectState", "State", "run"]
