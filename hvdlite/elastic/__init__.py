"""Elastic training: a state with commits, and a loop that returns to the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite.elastic.loop import run
    from hvdlite.elastic.state import HostUpdate, ObjectState, State

__all__ = ["HostUpdate", "ObjectState", "State", "run"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, which imports the engine, which imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdlite.elastic import state
    from hvdlite.elastic.loop import run

    globals().update(run=run, **{each: getattr(state, each) for each in __all__ if each != "run"})
    return globals()[name]
