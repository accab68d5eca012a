"""Benchmark training on two hosts that are joined by a slow link.

The hosts are network namespaces of this machine (see tests/harness/hosts.py), whose interfaces are
limited, so it takes Linux, root, and `tc`. The strategies take turns in one job, on a network
of 3.9 million weights, whose gradients are 15.8 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hvdlite.tools.bench import job, report
from tests.benchmarks import files
from tests.benchmarks.strategies import BY_NAME, ON_A_SLOW_LINK
from tests.harness.hosts import HostsUnavailableError, Network, network_hosts
from tests.launch import launcher

RANKS = 2
_SECONDS = 1800.0
_PROGRAM = f"""
import json, sys
from hvdlite.tools.bench import job
function, arguments, hosts = sys.argv[1:]
print(json.dumps(job.run({RANKS}, function, json.loads(arguments), hosts=hosts)))
"""


def main() -> None:
    """Measure, print, write the JSON; say so where it cannot be done here."""
    options = _parse_options()
    facts = report.machine()
    arguments = {"names": options.strategies, "limit": files.limits(options)}
    function = "tests.benchmarks.slow_link_ranks:measure"
    try:
        with network_hosts(RANKS, options.rate) as network:
            outcome = _run(network, function, arguments)
    except HostsUnavailableError as error:
        print(f"nothing measured: {error}")
        return
    document = files.save(options.output, "slow_link", facts, outcome, options)
    print(f"{options.rate / 1e6:g} Mbit/s, {RANKS} hosts of one rank")
    print()
    print(table(outcome.result))
    print()
    print(report.describe(document))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=100e6, help="bits per second (%(default)g)")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=tuple(BY_NAME),
        default=list(ON_A_SLOW_LINK),
        metavar="NAME",
    )
    files.add_common_options(parser, rounds=10, seconds=120.0)
    return parser.parse_args()


def _run(network: Network, function: str, arguments: dict[str, Any]) -> job.Outcome:
    """Run the job from the network's first host, with one rank on each."""
    words = [function, json.dumps(arguments), network.slots(*[1] * RANKS)]
    done = network.run(
        [sys.executable, "-c", _PROGRAM, *words], launcher.environment(), timeout=_SECONDS
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    return job.Outcome(*json.loads(done.stdout.splitlines()[-1]))


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
