"""Benchmark training on two hosts that are joined by a slow link.

The hosts are network namespaces of this machine (see tests/harness/hosts.py), whose interfaces are
limited, so it takes Linux, root, and `tc`. The strategies take turns in one job, on a network
of 3.9 million weights, whose gradients are 15.8 MB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.tools.bench import job, measurement, report
from hvdlite.tools.bench.measurement import Contender, Ranks, interleave
from tests.benchmarks import files, traffic
from tests.benchmarks.strategies import BY_NAME, DENSE, ON_A_SLOW_LINK, add_option
from tests.harness.hosts import HostsUnavailableError, network_hosts
from tests.launch import launcher

RANKS = 2
_INPUTS, _WIDTHS = 1024, (1280, 1280, 768)
_CLASSES = 10
_BATCH = 8
# In which parameters are compared, buckets packed anew, and low-rank factors found.
_WARM_UP_STEPS = 3
# In a row: what a link has saved up while it was silent is then a small part.
_STEPS = 3
_SECONDS = 1800.0
_PROGRAM = """
import json, sys
from hvdlite.tools.bench import job
size, function, arguments, hosts = sys.argv[1:]
print(json.dumps(job.run(int(size), function, json.loads(arguments), hosts=hosts)))
"""


def main() -> None:
    """Measure, print, write the JSON; say so where it cannot be done here."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--rate", type=float, default=100e6, help="bits per second (%(default)g)")
    add_option(parser, ON_A_SLOW_LINK)
    files.add_limits(parser, rounds=10, seconds=120.0)
    options = parser.parse_args()
    arguments = {"names": options.strategies, "limit": files.limits(options)}
    run = partial(run_on_hosts, rate=options.rate, seconds=_SECONDS)
    try:
        document = files.measure("slow_link", options, RANKS, arguments, run)
    except HostsUnavailableError as error:
        print(f"nothing measured: {error}")
        return
    print(f"{options.rate / 1e6:g} Mbit/s, {RANKS} hosts of one rank\n")
    print(f"{table(document['results'])}\n")
    print(report.describe(document))


def run_on_hosts(
    size: int, function: str, arguments: dict[str, Any], rate: float, seconds: float
) -> job.Outcome:
    """Run a job as `job.run` does, with one rank on each of as many hosts."""
    with network_hosts(size, rate) as network:
        words = [str(size), function, json.dumps(arguments), network.slots(*[1] * size)]
        command = [sys.executable, "-c", _PROGRAM, *words]
        done = network.run(command, launcher.environment(), timeout=seconds)
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    return job.Outcome(*json.loads(done.stdout.splitlines()[-1]))


def measure(comm: Any, names: Sequence[str], limit: dict[str, Any]) -> list[dict[str, Any]]:
    """Time training steps with each strategy, the dense exchange first; collective."""
    import torch

    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    with traffic.counting() as counter:
        hvd.init(comm)
    entries = [DENSE, *(BY_NAME[name] for name in names if name != DENSE.name)]
    contenders = [Contender(entry.name, _step_of(entry, comm.rank)) for entry in entries]
    sent = {}
    for contender in contenders:
        for _ in range(_WARM_UP_STEPS):
            before = counter.sent()
            contender.call()
        sent[contender.name] = comm.allreduce(counter.sent() - before) / comm.size
    seconds = interleave(Ranks(comm), contenders, _STEPS, **limit)
    hvd.shutdown()
    return [
        {
            "strategy": entry.name,
            "settings": entry.strategy.name,
            "bytes_per_step": sent[entry.name],
            "rounds": len(seconds[entry.name]),
            "steps_in_a_row": _STEPS,
            "seconds": measurement.summary(seconds[entry.name]),
            "speedup": measurement.summary(seconds[DENSE.name] / seconds[entry.name]),
        }
        for entry in entries
    ]


def _step_of(entry: Any, seed: int) -> Callable[[], None]:
    import torch

    from tests.benchmarks.compression_training import distributed, make_model, train_step

    model = make_model(_INPUTS, seed=0, widths=_WIDTHS)
    draw = np.random.default_rng(seed)
    images = torch.from_numpy(draw.standard_normal((_BATCH, _INPUTS), np.float32))
    labels = torch.from_numpy(draw.integers(_CLASSES, size=_BATCH))
    return partial(train_step, model, distributed(model, entry), images, labels)


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as a table in Markdown."""
    headings = ["strategy", "bytes per step", "step (10 - 90 %)", "steps/s", "of dense"]
    return files.markdown(headings, map(_row, records))


def _row(record: dict[str, Any]) -> list[str]:
    return [
        record["strategy"],
        f"{record['bytes_per_step']:,.0f}",
        report.spread_text(record["seconds"]),
        f"{1 / record['seconds']['median']:.2f}",
        f"{record['speedup']['median']:.1f}x",
    ]


if __name__ == "__main__":
    main()
