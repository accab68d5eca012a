"""A file in the user's cache folder for what has been measured on a machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite
from hvdlite import files

_log = logging.getLogger("hvdlite")


def machine(ranks: int) -> dict[str, Any]:
    """What a measurement among ``ranks`` ranks of this machine depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        # Fewer where the launcher binds ranks to cores, or a container has only some.
        "usable cores": len(os.sched_getaffinity(0)),
        "ranks": ranks,
        "hvdlite": hvdlite.__version__,
        "numpy": np.__version__,
    }


def path(machine: Mapping[str, Any]) -> Path:
    """The file for a machine: each has its own, so that jobs do not overwrite each other's.

    Raises:
        RuntimeError: this user has no home.
    """
    digest = hashlib.sha256(_text(machine).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "hvdlite" / f"tuning-{digest}.json"


def load(machine: Mapping[str, Any]) -> Any:
    """Return what was stored for a machine; None where there is nothing that can be read."""
    try:
        content = json.loads(path(machine).read_text())
        if content["machine"] == machine:
            return content["result"]
        _log.debug("%s is about another machine, and not used", path(machine))
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        _log.debug("no earlier tuning was read: %r", error)
    return None


def store(machine: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Keep a result for the next start, if this user may write there.

    Whoever reads at the same time finds the old file or the new one, never a part.
    """
    try:
        with files.replacing(path(machine)) as file:
            file.write(f"{_text({'machine': machine, 'result': result})}\n".encode())
    except (OSError, RuntimeError) as error:
        _log.debug("the tuning was not stored for the next start: %r", error)


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
