"""Benchmark the time that the exchange of gradients adds to a training step."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from tests.benchmarks import job, plots, report
from tests.benchmarks.workloads import WORKLOADS


def main() -> None:
    """Measure, print, write the JSON and the plot."""
    options = _parse_options()
    facts = report.machine()
    results: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for workload in options.models:
        arguments = {
            "framework": options.framework,
            "workload": workload,
            "limit": report.limits(options),
        }
        record, versions = job.run(
            options.ranks, "tests.benchmarks.training_ranks:measure", arguments
        )
        results.append(record)
    name = "training" if options.framework == "torch" else f"training-{options.framework}"
    document = report.save(options.output, name, facts, versions, options, results)
    plots.training(document, options.output / f"{name}.png")
    console = report.console()
    console.print(_table(results))
    console.print(report.describe(document), markup=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--models", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=report.positive, default=2)
    report.add_common_options(parser, rounds=200, seconds=75.0)
    return parser.parse_args()


def _table(records: list[dict[str, Any]]) -> Table:
    first = records[0]
    table = Table(title=f"Training step in {first['framework']}, {first['ranks']} ranks")
    for heading in ("model", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rounds", "step (10 - 90 %)", "overhead (10 - 90 %)", "hvdlite's / this"):
        table.add_column(heading, justify="right")
    for record in records:
        for name, seconds in record["seconds"].items():
            overhead = record["overhead_seconds"].get(name)
            ratio = record["overhead_ratios"].get(f"hvdlite / {name}")
            table.add_row(
                record["title"],
                name,
                str(record["rounds"]),
                report.spread_text(seconds),
                "" if overhead is None else report.spread_text(overhead),
                "" if ratio is None else report.ratio_text(ratio),
            )
        table.add_section()
    return table


if __name__ == "__main__":
    main()
