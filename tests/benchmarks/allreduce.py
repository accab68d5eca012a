"""Benchmark sums over all ranks: one float32 tensor, and a burst of 400, in place."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tests.benchmarks import job, plots, report

_SIZES = ["4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB"]
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "B": 1}


def main() -> None:
    """Measure, print, write the JSON and the plot."""
    options = _parse_options()
    facts = report.machine()
    results: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for ranks in options.ranks or [2, 4]:
        arguments = {
            "sizes": options.sizes,
            "burst": options.burst,
            "limit": report.limits(options),
        }
        records, versions = job.run(ranks, "tests.benchmarks.allreduce_ranks:measure", arguments)
        results += records
    document = report.save(options.output, "allreduce", facts, versions, options, results)
    plots.allreduce(document, options.output / "allreduce.png")
    console = report.console()
    for ranks in dict.fromkeys(record["ranks"] for record in results):
        own = [record for record in results if record["ranks"] == ranks]
        console.print(_times(own))
        console.print(_ratios(own))
    console.print(report.describe(document), markup=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=report.positive, action="append", help="may be repeated (2 and 4)"
    )
    parser.add_argument(
        "--sizes",
        type=_parse_size,
        nargs="*",
        default=[_parse_size(text) for text in _SIZES],
        metavar="BYTES",
        help=f"such as 65536 or 64KiB ({' '.join(_SIZES)})",
    )
    parser.add_argument(
        "--burst",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="400 asynchronous sums of 16 KiB at once",
    )
    report.add_common_options(parser, rounds=60, seconds=9.0)
    return parser.parse_args()


def _parse_size(text: str) -> int:
    """Return the bytes of a size such as ``64KiB``; whole float32 numbers, at least one."""
    number, factor = text, 1
    for unit, value in _UNITS.items():
        if text.endswith(unit):
            number, factor = text.removesuffix(unit), value
            break
    nbytes = int(number) * factor
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text}: expected a multiple of the 4 bytes of a float32")
    return nbytes


def _times(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of median times, a column for each contender."""
    names = _names(records, "seconds")
    table = _table(f"In-place sum of float32, {records[0]['ranks']} ranks", ["rounds", *names])
    for record in records:
        times = (record["seconds"].get(name) for name in names)
        texts = ("-" if time is None else report.time_text(time["median"]) for time in times)
        table.add_row(_case(record), str(record["rounds"]), *texts)
    return table


def _ratios(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the ratios of these times, with their spread."""
    names = _names(records, "ratios")
    table = _table(f"Ratios (10 - 90 %), {records[0]['ranks']} ranks", names)
    for record in records:
        ratios = (record["ratios"].get(name) for name in names)
        texts = ("-" if ratio is None else report.ratio_text(ratio) for ratio in ratios)
        table.add_row(_case(record), *texts)
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    for heading in ("size", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _names(records: Sequence[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record[key]))


def _case(record: dict[str, Any]) -> str:
    size = report.size_text(record["bytes"])
    return f"{record['tensors']} x {size}" if record["case"] == "burst" else size


if __name__ == "__main__":
    main()
