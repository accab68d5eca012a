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

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hvdlite.tools.bench import job, report
from hvdlite.tools.bench.measurement import Ranks, watch
from hvdlite.tools.cli.arguments import positive
from tests.benchmarks import files, traffic
from tests.benchmarks.strategies import BY_NAME, DENSE, Entry, add_option
from tests.harness.mpirun import ROOT

_MNIST = ROOT.parent / "shared" / "data" / "mnist"
_EPOCHS = {"digits": 20, "mnist": 5}
_TITLES = {"digits": "digits", "mnist": "MNIST"}
_SECONDS = 1800.0  # for all trainings with a strategy


def main() -> None:
    """Measure, print, write the JSON."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    add_option(parser, tuple(BY_NAME))
    parser.add_argument("--mnist", default=str(_MNIST), help="folder of its IDX files")
    parser.add_argument("--seeds", type=positive, default=3, help="(%(default)s)")
    parser.add_argument("--rounds", type=positive, default=9, help="of the timings (%(default)s)")
    parser.add_argument("--costs-only", action="store_true", help="without the accuracies")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, one round")
    options = parser.parse_args()
    there = {} if options.costs_only else {**_EPOCHS}
    if without_mnist := not options.costs_only and not Path(options.mnist).is_dir():
        del there["mnist"]
    arguments = {
        "names": options.strategies,
        "epochs": {name: 1 if options.quick else count for name, count in there.items()},
        "mnist": options.mnist,
        "seeds": 1 if options.quick else options.seeds,
        "rounds": 1 if options.quick else options.rounds,
    }
    document = files.measure("compression", options, options.ranks, arguments)
    print(f"{table(document['results'])}\n")
    print(report.describe(document))
    if without_mnist:
        print(f"without MNIST, which is not in {options.mnist}")


def measure(
    comm: Any, names: Sequence[str], epochs: Mapping[str, int], mnist: str, seeds: int, rounds: int
) -> list[dict[str, Any]]:
    """Go through the strategies, after one process that trains alone; collective.

    Accuracies are those of ``seeds`` trainings with as many ``epochs`` on each data set.
    """
    import torch

    import hvdlite.torch as hvd
    from tests.benchmarks.compression_training import Data, accuracy, bytes_per_step

    torch.set_num_threads(1)
    folders = {"digits": None, "mnist": Path(mnist)}
    data = {name: Data(folders[name]) for name in epochs}

    def accuracies(entry: Entry | None) -> dict[str, list[float]]:
        return {
            name: [accuracy(comm, entry, data[name], seed, epochs[name]) for seed in range(seeds)]
            for name in data
        }

    with traffic.counting() as counter:
        hvd.init(comm)
    job.say(comm, "one process")
    watch(_SECONDS)
    alone = {"strategy": "one process", "title": "one process", "accuracy": accuracies(None)}
    records: list[dict[str, Any]] = [alone]
    dense = bytes_per_step(comm, DENSE, counter)
    for entry in (BY_NAME[name] for name in names):
        job.say(comm, entry.name)
        watch(_SECONDS)
        sent = bytes_per_step(comm, entry, counter)
        records.append(
            {
                "strategy": entry.name,
                "title": entry.title,
                "settings": entry.strategy.name,
                "bytes_per_step": sent,
                "compression": dense / sent,
                "accuracy": accuracies(entry),
                **_cost(comm, entry, rounds),
            }
        )
    hvd.shutdown()
    return records


def _cost(comm: Any, entry: Entry, rounds: int) -> dict[str, Any]:
    """Measure first on one rank while the others sleep, then on all."""
    from mpi4py import MPI

    from hvdlite.transport.registry import connect
    from hvdlite.world import world
    from tests.benchmarks import compression_cost

    found = compression_cost.on_one_core(entry, rounds) if comm.rank == 0 else None
    Ranks(comm).meet()
    transport = connect(MPI, world.current())
    whole = compression_cost.on_all_ranks(comm, transport, entry, rounds)
    transport.close()
    return {"one_core": found, "all_ranks": whole}


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
