"""Benchmarks of hvdlite against the alternatives, measured in the same run.

    python -m tests.benchmarks.allreduce    sums of one tensor, and a burst of 400
    python -m tests.benchmarks.training     what the exchange adds to a training step
    python -m tests.benchmarks.scaling      images per second on 1, 2 and 4 processes
    python -m tests.benchmarks.gpu          sums on accelerators
    python -m tests.benchmarks.compression  what strategies save, cost, and do to the accuracy
    python -m tests.benchmarks.slow_link    training steps over a link of 100 Mbit/s

Each command starts mpirun by itself, prints a table, and writes a JSON file, and most a plot, to
``build/benchmarks``. ``--quick`` takes a tenth of the time.

How it is measured: all contenders live in the same processes and take turns, round by round, in an
order that changes; before each turn all ranks sleep until the last has arrived and then leave a
barrier together; the time of a turn is that of the slowest rank; every rank computes with one
thread. What a contender computes is checked before it is timed. Tables have medians, and the 10th
and 90th percentile of the rounds as spread. A ratio is the median of the ratios within each round,
which what else happens on the machine hardly touches.
"""
