"""Estimate pi by Monte Carlo on N processes, with mpi4py alone.

    python course_pi.py
    hvdliterun -np 2 python course_pi.py --samples 1000000000

A random point of the unit square lies inside the quarter circle with probability pi / 4. Every
rank draws its share of the points; the only communication is the sum of the counts.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
from mpi4py import MPI

_CHUNK = 100_000  # points drawn at a time: 1.6 MB, so that they stay in the cache


def main() -> None:
    """Draw, add the counts of all ranks, and print the estimate on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=400_000_000, help="points of all ranks")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.samples < 1:
        parser.error(f"--samples {options.samples}: expected at least 1")

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    # A stream of random numbers for each rank: with one seed for all, N ranks would
    # draw the same points N times.
    generator = np.random.default_rng([options.seed, rank])
    share = options.samples // size + (rank < options.samples % size)

    comm.Barrier()
    start = time.perf_counter()
    inside = count_inside(share, generator)
    total = comm.reduce(inside, op=MPI.SUM, root=0)
    seconds = time.perf_counter() - start

    if rank == 0:
        pi = 4 * total / options.samples
        # The standard deviation of 4 * (a mean of zeros and ones).
        deviation = 4 * math.sqrt(math.pi / 4 * (1 - math.pi / 4) / options.samples)
        print(
            f"{size} rank{'s' * (size > 1)}: pi = {pi:.6f}, error {pi - math.pi:+.6f} "
            f"(standard deviation {deviation:.6f}), {seconds:.2f} s"
        )


def count_inside(points: int, generator: np.random.Generator) -> int:
    """Return how many of so many random points lie inside the quarter circle."""
    inside = 0
    for start in range(0, points, _CHUNK):
        x, y = generator.random((2, min(_CHUNK, points - start)))
        inside += np.count_nonzero(x * x + y * y <= 1)
    return inside


if __name__ == "__main__":
    main()
