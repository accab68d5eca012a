"""Settings from the environment, read once at ``init()`` and validated there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdlite.errors import SettingsError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _number(kind: type, allowed: str, accept: Callable[[Any], bool]) -> dict[str, Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not accept(value):
            raise ValueError
        return value

    return {"parse": parse, "allowed": allowed}


def _seconds(allowed: str, accept: Callable[[float], bool]) -> dict[str, Any]:
    # The most is longer than any job, and still what a thread can be told to wait.
    return _number(float, f"a number of seconds{allowed}", lambda s: accept(s) and s <= 1e9)


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError
    return lowered in _TRUE


def _timeline(text: str) -> str:
    if text.endswith(os.sep):
        raise ValueError
    # Horovod's way to say that start_timeline() may be called later, which is always so here.
    return "" if text == "DYNAMIC" else text


def _log_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise ValueError
    return text.lower()


def _overlap(text: str) -> str:
    if text.lower() == "auto":
        return "auto"
    return "1" if _flag(text) else "0"


@dataclass(frozen=True)
class Settings:
    """What can be set from outside: field ``x`` is ``HVDLITE_X``, else ``HOROVOD_X``."""

    #: Bytes after which a gradient bucket is closed.
    fusion_threshold: int = field(
        default=25 * 2**20,
        metadata=_number(int, "a number of bytes, 0 or more", lambda value: value >= 0),
    )
    #: Bytes after which the first bucket is closed; small, so that exchange starts early.
    first_bucket_size: int = field(
        default=2**20,
        metadata=_number(int, "a number of bytes, 0 or more", lambda value: value >= 0),
    )
    #: Measure at the start which sizes of buckets and chunks suit this machine, once for each.
    #: Horovod's is off by default: it tries its values during training, and goes on for long.
    autotune: bool = field(default=True, metadata={"parse": _flag, "allowed": "0 or 1"})
    #: Whether buckets are exchanged while the backward pass goes on: "1", "0", or "auto", where a
    #: rank has a core to spare for it or waits for a network.
    overlap: str = field(default="auto", metadata={"parse": _overlap, "allowed": "0, 1 or auto"})
    #: Milliseconds that a lane's thread lets submissions come together before it turns to them,
    #: if nobody waits for them meanwhile.
    cycle_time: float = field(
        default=1.0,
        metadata=_number(float, "a number of milliseconds, 0 to 1000", lambda ms: 0 <= ms <= 1000),
    )
    #: Named calls that are kept ready for the next time; 0: none.
    cache_capacity: int = field(
        default=1024,
        metadata=_number(int, "a number of calls, 0 or more", lambda value: value >= 0),
    )
    #: No report of ranks that wait for each other.
    stall_check_disable: bool = field(default=False, metadata={"parse": _flag, "allowed": "0 or 1"})
    #: Seconds of waiting after which a report is made, and again after as many.
    stall_check_time_seconds: float = field(
        default=60.0,
        metadata=_seconds(" above 0", lambda value: value > 0),
    )
    #: Seconds of waiting after which the wait becomes an error; 0: never.
    stall_shutdown_time_seconds: float = field(
        default=0.0,
        metadata=_seconds(", or 0 for never", lambda value: value >= 0),
    )
    #: Seconds that ``shutdown()`` waits for the other ranks.
    shutdown_timeout_seconds: float = field(
        default=30.0,
        metadata=_seconds(" above 0", lambda value: value > 0),
    )
    #: Seconds in which the ranks have to come together again after a failure (`hvdlite.elastic`).
    elastic_timeout: float = field(
        default=600.0,
        metadata=_seconds(" above 0", lambda value: value > 0),
    )
    #: Failures in a row, without a commit between them, that elastic training survives; 0: all.
    elastic_retries: int = field(
        default=3,
        metadata=_number(int, "a number of failures, or 0 for no limit", lambda value: value >= 0),
    )
    #: Let the ranks of a node exchange through memory that they share.
    shared_memory: bool = field(default=True, metadata={"parse": _flag, "allowed": "0 or 1"})
    #: Ranks that count as one node; 0: as the hardware says. For tests of several nodes.
    force_local_size: int = field(
        default=0, metadata=_number(int, "a number of ranks, or 0", lambda value: value >= 0)
    )
    #: The file that a timeline is written to from ``init()`` on; empty: none.
    timeline: str = field(
        default="", metadata={"parse": _timeline, "allowed": "the path of a file, or empty"}
    )
    #: Whether that timeline marks each round of communication.
    timeline_mark_cycles: bool = field(
        default=False, metadata={"parse": _flag, "allowed": "0 or 1"}
    )
    #: Verbosity of the ``hvdlite`` logger.
    log_level: str = field(
        default="warning", metadata={"parse": _log_level, "allowed": ", ".join(_LOG_LEVELS)}
    )
    #: The names of those above that the environment has set; not a setting itself.
    given: frozenset[str] = frozenset()

    def is_given(self, name: str) -> bool:
        """Whether somebody has chosen a setting, even if to be what it is by default."""
        return name in self.given or getattr(self, name) != getattr(Settings, name)


# What would have ranks that differ in it run different collectives.
_SAME_EVERYWHERE = ("shared_memory", "force_local_size", "fusion_threshold", "autotune")


def compare(settings: Settings, comm: Any) -> None:
    """Refuse settings that would have the ranks do different things; collective.

    Args:
        settings: this rank's.
        comm: over all ranks.

    Raises:
        SettingsError: a setting that has to be the same on all ranks is not.
    """
    everywhere = comm.allgather([getattr(settings, name) for name in _SAME_EVERYWHERE])
    for name, values in zip(_SAME_EVERYWHERE, zip(*everywhere, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise SettingsError(
                    f"HVDLITE_{name.upper()} is {values[0]} on rank 0 and {value} on rank {rank}; "
                    "set it to the same on all ranks"
                )


def read(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings from environment variables.

    Raises:
        SettingsError: a variable cannot be read; the message names it, its value and
            what is allowed.
    """
    values = {}
    for entry in fields(Settings):
        if not entry.metadata:
            continue
        for prefix in ("HVDLITE_", "HOROVOD_"):
            variable = prefix + entry.name.upper()
            text = environment.get(variable)
            if text is None:
                continue
            try:
                values[entry.name] = entry.metadata["parse"](text.strip())
            except ValueError:
                allowed = entry.metadata["allowed"]
                raise SettingsError(f"{variable}={text!r} is not {allowed}") from None
            break
    return Settings(**values, given=frozenset(values))
