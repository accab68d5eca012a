"""Options and files of the benchmarks, and the way of one from its options to its file."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.tools.bench import job, report
from hvdlite.tools.cli import main as cli
from hvdlite.tools.cli.arguments import positive
from tests.harness.mpirun import ROOT

DEFAULT_OUTPUT = ROOT / "build" / "benchmarks"


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser that has ``--output``, with a benchmark's docstring as its help."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=kind)
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="folder (build/benchmarks)"
    )
    return parser


def add_limits(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
    """Add the options that limit a measurement: its most rounds, and the seconds of one case."""
    parser.add_argument("--rounds", type=positive, default=rounds, help="at most (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="per case, about, at most (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `rounds` that the options ask for."""
    seconds, least = (options.seconds / 10, 1) if options.quick else (options.seconds, 3)
    return {"rounds": options.rounds, "seconds": seconds, "at_least": least}


def measure(
    name: str,
    options: argparse.Namespace,
    ranks: int,
    arguments: Mapping[str, Any],
    run: Callable[..., job.Outcome] = job.run,
) -> dict[str, Any]:
    """Call a benchmark's function `measure` in a job, and write ``NAME.json``; return that."""
    facts = report.machine()
    return save(name, facts, run(ranks, f"tests.benchmarks.{name}:measure", arguments), options)


def save(
    name: str, facts: Mapping[str, Any], outcome: job.Outcome, options: argparse.Namespace
) -> dict[str, Any]:
    """Write ``NAME.json``: the machine's facts from before, a record for each case, the options."""
    document = {
        "benchmark": name,
        "machine": {**facts, "revision": _revision(), "versions": outcome.versions},
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "results": outcome.result,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def bench(benchmark: str, words: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Run ``hvdlite bench`` with the options of this process after other defaults than its own.

    Returns:
        The document, and the folder ``--output``, which has it and the plot.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    known, own = parser.parse_known_args()
    known.output.mkdir(parents=True, exist_ok=True)
    path = known.output / f"{benchmark}.json"
    files = ["--json", str(path), "--plot", str(path.with_suffix(".png"))]
    if code := cli.main(["bench", benchmark, *words, *files, *own]):
        sys.exit(code)
    document: dict[str, Any] = json.loads(path.read_text())
    document["machine"]["revision"] = _revision()
    path.write_text(json.dumps(document, indent=2) + "\n")
    return document, known.output


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for documents, aligned as `hvdlite.tools.bench.report.table`."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def median_text(values: Sequence[float], digits: int) -> str:
    """Return a median, and the least and the greatest value: 1.2 (1.0 to 1.5)."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
