"""Ranks of the training benchmark on models so small that starting is most of the work."""

from dataclasses import replace

from hvdlite.tools.bench import training_ranks
from hvdlite.tools.bench.workloads import WORKLOADS

WORKLOADS.update(
    {name: replace(each, widths=each.widths and (64, 64)) for name, each in WORKLOADS.items()}
)
measure = training_ranks.measure
