"""Elastic training: a state with commits, and a loop that returns to the last one.

After a death the survivors go on within the step: `Recovery` in ``recovery.py``, the `Supervisor`
(``engine/supervisor.py``) of an elastic job.
"""

from __future__ import annotations

from hvdlite.elastic.loop import run
from hvdlite.elastic.state import HostUpdate, ObjectState, State

__all__ = ["HostUpdate", "ObjectState", "State", "run"]
