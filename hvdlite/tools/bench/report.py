"""The facts of the machine; sizes, times and tables as text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Spread = Mapping[str, float]

_KIB = 1024
UNITS = {"GiB": _KIB**3, "MiB": _KIB**2, "KiB": _KIB, "B": 1}


def machine() -> dict[str, Any]:
    """Describe this machine, on which the figures depend."""
    processors = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": (processors or ["unknown"])[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _KIB**3, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def describe(document: Mapping[str, Any]) -> str:
    """Return one line about the machine, for tables and plots."""
    facts = document["machine"]
    return f"{facts['cpu']}, {facts['cores']} cores; {facts['date'][:10]}; one thread per rank"


def count_text(number: int, noun: str) -> str:
    """Return a number of things: 1 rank, 2 ranks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(nbytes: int) -> str:
    """Return bytes for people: 4 KiB."""
    unit = next(unit for unit, factor in UNITS.items() if nbytes % factor == 0)
    return f"{nbytes // UNITS[unit]} {unit}"


def time_text(seconds: float) -> str:
    """Return seconds for people: 12.3 ms."""
    factor, unit = _unit(seconds)
    return f"{_three_digits(factor * seconds)} {unit}"


def spread_text(values: Spread | None) -> str:
    """Return a median time and its spread: 12.3 (12.1 - 13.0) ms; a dash for none."""
    if values is None:
        return "-"
    factor, unit = _unit(values["median"])
    return f"{_spread(values, lambda value: _three_digits(factor * value))} {unit}"


def ratio_text(values: Spread | None) -> str:
    """Return a median ratio and its spread: 5.6 (4.5 - 7.4); a dash for none."""
    if values is None:
        return "-"
    return _spread(values, lambda value: f"{value:.2g}" if abs(value) < 1 else _three_digits(value))


def _spread(values: Spread, text: Callable[[float], str]) -> str:
    return f"{text(values['median'])} ({text(values['p10'])} - {text(values['p90'])})"


def _unit(seconds: float) -> tuple[float, str]:
    if abs(seconds) < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if abs(seconds) < 1 else (1.0, "s")


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a terminal; all columns but the first are aligned to the right."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    )
