"""Benchmark a ResNet-18 at 32x32 on several numbers of processes.

One job has as many ranks as the largest number. In each round each number of ranks has its turn,
while the others sleep: so a number's figures are from the same minutes as all others', which
separate jobs' would not be. The limit is the same step without exchange on as many ranks at once.
"""

from __future__ import annotations

import argparse
from typing import Any

from hvdlite.tools.bench import job, report
from hvdlite.tools.cli.arguments import positive
from tests.benchmarks import files, plots


def main() -> None:
    """Measure, print, write the JSON and the plot."""
    options = _parse_options()
    facts = report.machine()
    processes = sorted({1, *(options.ranks or [1, 2, 4])})
    arguments = {
        "processes": processes,
        "batch": options.batch,
        "steps": options.steps,
        "limit": files.limits(options),
    }
    outcome = job.run(processes[-1], "tests.benchmarks.scaling_ranks:measure", arguments)
    document = files.save(options.output, "scaling", facts, outcome, options)
    plots.scaling(document, options.output / "scaling.png")
    print(_table(outcome.result))
    print(report.describe(document))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=positive, action="append", help="may be repeated (1, 2 and 4)"
    )
    parser.add_argument(
        "--batch", type=positive, default=32, help="images per process (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=2, help="in a row (%(default)s)")
    files.add_common_options(parser, rounds=20, seconds=190.0)
    return parser.parse_args()


def _table(records: list[dict[str, Any]]) -> str:
    headings = (
        "processes",
        "rounds",
        "images/s (10 - 90 %)",
        "without exchange",
        "of 1 process",
        "efficiency",
        "of the limit",
    )
    rows = []
    for record in records:
        images = record["images_per_second"]
        rows.append(
            [
                str(record["processes"]),
                str(record["rounds"]),
                _images_text(images["hvdlite"]),
                _images_text(images["alone"]),
                f"{record['speedup']['median']:.2f}x",
                f"{record['efficiency']['median']:.0%}",
                f"{record['of_limit']['median']:.1%}",
            ]
        )
    title = f"ResNet-18 at 32x32, batch {records[0]['batch_per_process']} per process"
    return f"{title}\n{report.table(headings, rows)}"


def _images_text(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['p10']:.1f} - {values['p90']:.1f})"


if __name__ == "__main__":
    main()
