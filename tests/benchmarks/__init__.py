"""Benchmarks of hvdlite against the alternatives, measured in the same run.

    python -m tests.benchmarks.allreduce    sums of one tensor, and a burst of 400
    python -m tests.benchmarks.training     what the exchange adds to a training step
    python -m tests.benchmarks.gpu          sums on accelerators
    python -m tests.benchmarks.compression  what strategies save, cost, and do to the accuracy
    python -m tests.benchmarks.slow_link    training steps over a link of 100 Mbit/s

Each command starts mpirun by itself, prints a table, and writes a JSON file, and most a plot, to
``build/benchmarks``. ``--quick`` takes a tenth of the time. docs/guides/benchmarks.md says how
they measure. Parts of a module that only ranks run import PyTorch and MPI by themselves.
"""
