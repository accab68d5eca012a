"""Have each rank of a small job die at each point that it gets to, over a simulated MPI.

python -m tests.campaigns.crash_points                     # ranks in turn
python -m tests.campaigns.crash_points --orders 4          # and in other orders of turns
python -m tests.campaigns.crash_points --pairs 1000        # instead, two deaths, at random
python -m tests.campaigns.crash_points --sets              # instead, while a process set is added
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.campaigns import make_parser
from tests.elastic import crash_points
from tests.simulated_mpi import Crash


def plans(options: argparse.Namespace) -> Iterator[tuple[Sequence[Crash], int | None]]:
    """Yield the deaths of each run and the seed of its order of turns."""
    orders = [] if options.pairs else [None, *range(1, options.orders + 1)]
    for seed in orders:
        for crash in crash_points.crashes(seed, options.sets):
            yield [crash], seed
    chance = random.Random(options.seed)
    first = crash_points.crashes()
    for _ in range(options.pairs):
        one, other = chance.sample(first, 2)
        # The second one may come in the recovery, whose turns follow.
        later = other._replace(turn=one.turn + chance.randint(0, 60))
        others = [rank for rank in range(crash_points.RANKS) if rank != one.rank]
        yield [one, later._replace(rank=chance.choice(others))], None


def main() -> None:
    """Run the campaign and print what came out."""
    parser = make_parser(__doc__)
    parser.add_argument("--orders", type=int, default=0, help="how many other orders of turns")
    parser.add_argument("--pairs", type=int, default=0, help="instead, runs with two deaths")
    parser.add_argument("--sets", action="store_true", help="instead, add a process set")
    options = parser.parse_args()
    logging.getLogger("hvdlite").setLevel(logging.CRITICAL)
    check = crash_points.check_adding if options.sets else crash_points.check
    left: Counter[int] = Counter()
    for planned, seed in plans(options):
        try:
            left[check(planned, seed)] += 1
        except AssertionError as error:
            print(f"{planned}, order {seed}: {error!r} from {error.__cause__!r}")
            raise SystemExit(1) from None
    print(f"{left.total()} runs, and those that were left went on with the right values")
    for ranks, count in sorted(left.items()):
        print(f"{count} times {ranks} of {crash_points.RANKS} ranks were left")


if __name__ == "__main__":
    main()
