"""Benchmark a ResNet-18 at 32x32 on several numbers of processes.

One job has as many ranks as the largest number. In each round each number of ranks has its turn,
while the others sleep: so a number's figures are from the same minutes as all others', which
separate jobs' would not be. The limit is the same step without exchange on as many ranks at once.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from tests.benchmarks import job, plots, report


def main() -> None:
    """Measure, print, write the JSON and the plot."""
    options = _parse_options()
    facts = report.machine()
    processes = sorted({1, *(options.ranks or [1, 2, 4])})
    arguments = {
        "processes": processes,
        "batch": options.batch,
        "steps": options.steps,
        "limit": report.limits(options),
    }
    results, versions = job.run(processes[-1], "tests.benchmarks.scaling_ranks:measure", arguments)
    document = report.save(options.output, "scaling", facts, versions, options, results)
    plots.scaling(document, options.output / "scaling.png")
    console = report.console()
    console.print(_table(results))
    console.print(report.describe(document), markup=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=report.positive, action="append", help="may be repeated (1, 2 and 4)"
    )
    parser.add_argument(
        "--batch", type=report.positive, default=32, help="images per process (%(default)s)"
    )
    parser.add_argument("--steps", type=report.positive, default=2, help="in a row (%(default)s)")
    report.add_common_options(parser, rounds=20, seconds=190.0)
    return parser.parse_args()


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table(title=f"ResNet-18 at 32x32, batch {records[0]['batch_per_process']} per process")
    for heading in (
        "processes",
        "rounds",
        "images/s (10 - 90 %)",
        "without exchange",
        "of 1 process",
        "efficiency",
        "of the limit",
    ):
        table.add_column(heading, justify="right")
    for record in records:
        images = record["images_per_second"]
        table.add_row(
            str(record["processes"]),
            str(record["rounds"]),
            _images_text(images["hvdlite"]),
            _images_text(images["alone"]),
            f"{record['speedup']['median']:.2f}x",
            f"{record['efficiency']['median']:.0%}",
            f"{record['of_limit']['median']:.1%}",
        )
    return table


def _images_text(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['p10']:.1f} - {values['p90']:.1f})"


if __name__ == "__main__":
    main()
