"""Benchmark a ResNet-18 at 32x32 on several numbers of processes.

One job has as many ranks as the largest number. In each round each number of ranks has its turn,
while the others sleep: so a number's figures are from the same minutes as all others', which
separate jobs' would not be. The limit is the same step without exchange on as many ranks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.tools.bench import job, measurement, report
from hvdlite.tools.bench.measurement import Ranks, order, rounds, timed
from hvdlite.tools.cli.arguments import positive
from tests.benchmarks import files, plots

# After a start: one in which the parameters are compared, one in which the buckets are packed anew,
# and one in which nobody has touched their memory before.
_WARM_UP_STEPS = 3


def main() -> None:
    """Measure, print, write the JSON and the plot."""
    parser = files.make_parser(__doc__)
    parser.add_argument(
        "--ranks", type=positive, action="append", help="may be repeated (1, 2 and 4)"
    )
    parser.add_argument(
        "--batch", type=positive, default=32, help="images per process (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=2, help="in a row (%(default)s)")
    files.add_limits(parser, rounds=20, seconds=190.0)
    options = parser.parse_args()
    processes = sorted({1, *(options.ranks or [1, 2, 4])})
    arguments = {
        "processes": processes,
        "batch": options.batch,
        "steps": options.steps,
        "limit": files.limits(options),
    }
    document = files.measure("scaling", options, processes[-1], arguments)
    plots.scaling(document, options.output / "scaling.png")
    print(_table(document["results"]))
    print(report.describe(document))


def measure(
    comm: Any, processes: Sequence[int], batch: int, steps: int, limit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time training steps on several numbers of processes, 1 among them; collective.

    In each round, each number has its turn: that many ranks start hvdlite among themselves and
    train, with the exchange and without, while the other ranks sleep.
    """
    import torch

    torch.set_num_threads(1)
    replicas = _replicas(comm, batch)
    teams = {number: comm.Split(int(comm.rank < number), comm.rank) for number in processes}
    rows = []
    for turn in rounds(Ranks(comm), **limit):
        job.say(comm, f"round {turn + 1}")
        row = np.zeros((len(processes), len(replicas)))
        for index in order(len(processes), turn):
            number = processes[index]
            if comm.rank < number:
                row[index] = _train(teams[number], replicas, steps, turn)
            Ranks(comm).meet()
        rows.append(row)
    images = steps * batch * np.array(processes)[:, None] / Ranks(comm).slowest(rows)
    by_name = dict(zip(replicas, np.moveaxis(images, 2, 0), strict=True))
    single = by_name["alone"][:, processes.index(1)]  # one process that trains without hvdlite
    records = []
    for index, number in enumerate(processes):
        found = {name: values[:, index] for name, values in by_name.items()}
        records.append(
            {
                "processes": number,
                "batch_per_process": batch,
                "steps_in_a_row": steps,
                "rounds": len(single),
                "images_per_second": {
                    name: measurement.summary(values) for name, values in found.items()
                },
                "speedup": measurement.summary(found["hvdlite"] / single),
                "efficiency": measurement.summary(found["hvdlite"] / (number * single)),
                "of_limit": measurement.summary(found["hvdlite"] / found["alone"]),
                "speedup_of_limit": measurement.summary(found["alone"] / single),
            }
        )
    return records


def _replicas(comm: Any, batch: int) -> dict[str, Any]:
    """Make the contenders on all ranks at once, and train them a first time."""
    import hvdlite.torch as hvd
    from hvdlite.torch import benchmark

    hvd.init(comm)
    replicas = {
        name: benchmark.Replica(name, "resnet", batch, comm.rank, getattr(benchmark, name))
        for name in ("alone", "hvdlite")
    }
    for replica in replicas.values():
        replica.step()
    hvd.shutdown()
    return replicas


def _train(team: Any, replicas: dict[str, Any], steps: int, turn: int) -> list[float]:
    """Return this rank's seconds for the steps of each contender."""
    import hvdlite.torch as hvd

    hvd.init(team)
    # Some ranks of the team have trained more steps than others.
    hvd.broadcast_parameters(replicas["hvdlite"].model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(replicas["hvdlite"].optimizer, root_rank=0)
    for _ in range(_WARM_UP_STEPS):
        replicas["hvdlite"].step()
    seconds = [0.0] * len(replicas)
    for index in order(len(replicas), turn):
        Ranks(team).meet()
        seconds[index] = steps * timed([*replicas.values()][index].step, steps)
    hvd.shutdown()
    return seconds


def _table(records: list[dict[str, Any]]) -> str:
    headings = ["processes", "rounds", "images/s (10 - 90 %)", "without exchange"]
    headings += ["of 1 process", "efficiency", "of the limit"]
    rows = [
        [
            str(record["processes"]),
            str(record["rounds"]),
            *map(_images_text, map(record["images_per_second"].get, ("hvdlite", "alone"))),
            f"{record['speedup']['median']:.2f}x",
            f"{record['efficiency']['median']:.0%}",
            f"{record['of_limit']['median']:.1%}",
        ]
        for record in records
    ]
    title = f"ResNet-18 at 32x32, batch {records[0]['batch_per_process']} per process"
    return f"{title}\n{report.table(headings, rows)}"


def _images_text(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['p10']:.1f} - {values['p90']:.1f})"


if __name__ == "__main__":
    main()
