"""Benchmark what each strategy saves, costs, and does to the accuracy.

Bytes are those that a rank sends in a step for the gradients of a network with 235,146 weights,
counted in the transport. Accuracies are those on the test images of scikit-learn's digits and of
MNIST, after as many epochs with each strategy, the mean of several seeds; the strategies of one
seed begin with the same weights, and see the same batches. Times and memory are those of a bucket
of 25 MiB: until the first bytes could be sent (also as a multiple of a memcpy of it), of all that
a rank does besides sending, and of an exchange in shared memory, where dense gradients are the
fastest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from hvdlite.tools.bench import job, report
from hvdlite.tools.cli.arguments import positive
from tests.benchmarks import files
from tests.benchmarks.strategies import BY_NAME
from tests.harness.mpirun import ROOT

_MNIST = ROOT.parent / "shared" / "data" / "mnist"
_EPOCHS = {"digits": 20, "mnist": 5}
_TITLES = {"digits": "digits", "mnist": "MNIST"}


def main() -> None:
    """Measure, print, write the JSON."""
    options = _parse_options()
    facts = report.machine()
    arguments = {
        "names": options.strategies,
        "epochs": _epochs(options),
        "mnist": options.mnist,
        "seeds": 1 if options.quick else options.seeds,
        "rounds": 1 if options.quick else options.rounds,
    }
    outcome = job.run(options.ranks, "tests.benchmarks.compression_ranks:measure", arguments)
    document = files.save(options.output, "compression", facts, outcome, options)
    print(table(outcome.result))
    print()
    print(report.describe(document))
    if "mnist" not in arguments["epochs"] and not options.costs_only:
        print(f"without MNIST, which is not in {options.mnist}")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument(
        "--strategies", nargs="+", choices=tuple(BY_NAME), default=list(BY_NAME), metavar="NAME"
    )
    parser.add_argument("--mnist", default=str(_MNIST), help="folder of its IDX files")
    parser.add_argument("--seeds", type=positive, default=3, help="(%(default)s)")
    parser.add_argument("--rounds", type=positive, default=9, help="of the timings (%(default)s)")
    parser.add_argument("--costs-only", action="store_true", help="without the accuracies")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, one round")
    parser.add_argument("--output", type=Path, default=files.DEFAULT_OUTPUT)
    return parser.parse_args()


def _epochs(options: argparse.Namespace) -> dict[str, int]:
    """Return the number of epochs of each data set that there is."""
    if options.costs_only:
        return {}
    there = {name: count for name, count in _EPOCHS.items() if name != "mnist"}
    if Path(options.mnist).is_dir():
        there = _EPOCHS
    return {name: 1 if options.quick else count for name, count in there.items()}


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as a table in Markdown."""
    sets = list(records[0]["accuracy"])
    headings = ["strategy", "bytes per step", "of dense", *(_TITLES[name] for name in sets)]
    headings += ["encode 25 MiB", "and decode", "exchange", "memory"]
    return files.markdown(headings, [_row(record, sets) for record in records])


def _row(record: dict[str, Any], sets: list[str]) -> list[str]:
    accuracies = [f"{fmean(record['accuracy'][each]):.2%}" for each in sets]
    if "one_core" not in record:
        return [record["title"], "", "", *accuracies, *[""] * 4]
    core = record["one_core"]
    return [
        record["title"],
        f"{record['bytes_per_step']:,.0f}",
        f"1/{record['compression']:.1f}",
        *accuracies,
        f"{report.time_text(core['encode']['median'])} ({core['encode / memcpy']['median']:.1f}x)",
        report.time_text(core["alone"]["median"]),
        report.time_text(record["all_ranks"]["exchange"]["median"]),
        f"{core['peak']:.2f}x",
    ]


if __name__ == "__main__":
    main()
