"""Options and files of the benchmarks."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.tools.bench.job import Outcome
from hvdlite.tools.cli import main as cli
from hvdlite.tools.cli.arguments import positive
from tests.harness.mpirun import ROOT

DEFAULT_OUTPUT = ROOT / "build" / "benchmarks"


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


def save(
    folder: Path,
    name: str,
    facts: Mapping[str, Any],
    outcome: Outcome,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Write ``<name>.json``.

    Args:
        folder: made where it is missing.
        name: of the benchmark.
        facts: `hvdlite.tools.bench.report.machine`, from before the measurement.
        outcome: of the job, whose result is one record per case.
        options: of the command line.

    Returns:
        What was written.
    """
    asked = {key: value for key, value in vars(options).items() if key != "output"}
    document = {
        "benchmark": name,
        "machine": {**facts, "revision": _revision(), "versions": outcome.versions},
        "options": asked,
        "results": outcome.result,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def bench(benchmark: str, words: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Run ``hvdlite bench`` with the options of this process after these.

    Args:
        benchmark: which one.
        words: other defaults than the command's own.

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


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
