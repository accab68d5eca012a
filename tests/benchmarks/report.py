"""Files of a benchmark: a JSON file with the facts of the machine, and a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.harness.mpirun import ROOT

DEFAULT_OUTPUT = ROOT / "build" / "benchmarks"

_KIB = 1024
_WIDTH = 130


def add_common_options(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
    """Add the options that all benchmarks have.

    Args:
        parser: of the command line.
        rounds: the default of the most rounds.
        seconds: the default of the time limit of one case.
    """
    parser.add_argument("--rounds", type=positive, default=rounds, help="at most (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="per case, about, at most (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="folder (build/benchmarks)"
    )


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Limit` that the options ask for."""
    if options.quick:
        return {"rounds": options.rounds, "seconds": options.seconds / 10, "at_least": 1}
    return {"rounds": options.rounds, "seconds": options.seconds, "at_least": 3}


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that the figures depend on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _KIB**3, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "revision": _revision(),
    }


def save(
    folder: Path,
    name: str,
    facts: Mapping[str, Any],
    versions: Mapping[str, str],
    options: argparse.Namespace,
    results: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write ``<name>.json``.

    Args:
        folder: made where it is missing.
        name: of the benchmark.
        facts: `machine`, from before the measurement.
        versions: of what was measured.
        options: of the command line.
        results: one record per case.

    Returns:
        What was written.
    """
    asked = {key: value for key, value in vars(options).items() if key != "output"}
    document = {
        "benchmark": name,
        "machine": {**facts, "versions": dict(versions)},
        "options": asked,
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def console() -> Console:
    """Return the console for tables, which is wide enough in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for documents; all columns but the first are aligned to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe(document: Mapping[str, Any]) -> str:
    """Return one line about the machine, for tables and plots."""
    facts = document["machine"]
    return f"{facts['cpu']}, {facts['cores']} cores; {facts['date'][:10]}; one thread per rank"


def size_text(nbytes: int) -> str:
    """Return bytes for people: 4 KiB."""
    for unit, factor in (("GiB", _KIB**3), ("MiB", _KIB**2), ("KiB", _KIB)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """Return seconds for people: 12.3 ms."""
    factor, unit = _unit(seconds)
    return f"{_three_digits(factor * seconds)} {unit}"


def spread_text(values: Mapping[str, float]) -> str:
    """Return a median time and its spread: 12.3 (12.1 - 13.0) ms."""
    factor, unit = _unit(values["median"])
    median, low, high = (_three_digits(factor * values[key]) for key in ("median", "p10", "p90"))
    return f"{median} ({low} - {high}) {unit}"


def ratio_text(values: Mapping[str, float]) -> str:
    """Return a median ratio and its spread."""
    median, low, high = (_three_digits(values[key]) for key in ("median", "p10", "p90"))
    return f"{median} ({low} - {high})"


def _unit(seconds: float) -> tuple[float, str]:
    if abs(seconds) < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if abs(seconds) < 1 else (1.0, "s")


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
