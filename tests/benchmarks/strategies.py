"""The strategies that the benchmarks compare: a new one is a line here."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.exchange import Compression, Strategy

LEARNING_RATE = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True)
class Entry:
    """A strategy as one would use it.

    Attributes:
        name: for tables.
        strategy: with error feedback where it needs that.
        learning_rate: the same for all but those that change the size of a step.
    """

    name: str
    strategy: Strategy
    learning_rate: float = LEARNING_RATE


_feedback = Compression.ErrorFeedback

ENTRIES = (
    Entry("none", Compression.none),
    Entry("fp16", Compression.fp16),
    Entry("bf16", Compression.bf16),
    Entry("PowerSGD, rank 4", _feedback(Compression.PowerSGD(4))),
    Entry("PowerSGD, rank 1", _feedback(Compression.PowerSGD(1))),
)

BY_NAME = {entry.name: entry for entry in ENTRIES}
DENSE = ENTRIES[0]

ON_A_SLOW_LINK = ("none", "fp16", "PowerSGD, rank 4")
"""Those that are compared there."""
