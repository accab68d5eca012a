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


def _log_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise ValueError
    return text.lower()


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
    #: Ranks that count as one node; 0: as the hardware says. For tests of several nodes.
    force_local_size: int = field(
        default=0, metadata=_number(int, "a number of ranks, or 0", lambda value: value >= 0)
    )
    #: Verbosity of the ``hvdlite`` logger.
    log_level: str = field(
        default="warning", metadata={"parse": _log_level, "allowed": ", ".join(_LOG_LEVELS)}
    )


def read(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings from environment variables.

    Raises:
        SettingsError: a variable cannot be read; the message names it, its value and
            what is allowed.
    """
    values = {}
    for entry in fields(Settings):
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
    return Settings(**values)
