"""The strategies that the benchmarks compare: a new one is a line here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.compression import Compression, Strategy

LEARNING_RATE = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True)
class Entry:
    """A strategy with its usual options.

    Attributes:
        name: for tables.
        strategy: with error feedback where it needs that.
        learning_rate: of SGD; the same for all but those that change the size of a step.
        momentum: likewise, for all but those that have one of their own.
    """

    name: str
    strategy: Strategy
    learning_rate: float = LEARNING_RATE
    momentum: float = MOMENTUM

    @property
    def title(self) -> str:
        """The name, with the way of training where it differs from the others'."""
        own = []
        if self.learning_rate != LEARNING_RATE:
            own.append(f"learning rate {self.learning_rate:g}")
        if self.momentum != MOMENTUM:
            own.append(f"momentum {self.momentum:g}")
        return f"{self.name} ({', '.join(own)})" if own else self.name


_feedback = Compression.ErrorFeedback

ENTRIES = (
    Entry("none", Compression.none),
    Entry("fp16", Compression.fp16),
    Entry("bf16", Compression.bf16),
    Entry("fp8", _feedback(Compression.Float8())),
    Entry("blockwise 8-bit", _feedback(Compression.Blockwise8())),
    Entry("natural", Compression.Natural()),
    Entry("QSGD, 7 levels", Compression.QSGD()),
    Entry("QSGD, 127 levels", Compression.QSGD(127)),
    Entry("TernGrad", Compression.TernGrad()),
    Entry("2-bit", _feedback(Compression.TwoBit(0.01)), learning_rate=0.1, momentum=0.0),
    Entry("1-bit", _feedback(Compression.Sign()), learning_rate=0.02),
    Entry("majority vote", Compression.MajorityVote(), learning_rate=0.0001),
    Entry("top-k 1 %", _feedback(Compression.TopK(0.01))),
    Entry("top-k 0.1 %", _feedback(Compression.TopK(0.001))),
    Entry("top-k 1 % of each tensor", _feedback(Compression.TopK(0.01, per="tensor"))),
    Entry("threshold 0.01", _feedback(Compression.Threshold(0.01))),
    Entry("random-k 10 %", _feedback(Compression.RandomK(0.1)), learning_rate=0.1, momentum=0.0),
    Entry(
        "deep gradient compression 1 %",
        Compression.DeepGradientCompression(0.01, momentum=MOMENTUM),
        momentum=0.0,
    ),
    Entry("PowerSGD, rank 4", _feedback(Compression.PowerSGD(4))),
    Entry("PowerSGD, rank 1", _feedback(Compression.PowerSGD(1))),
)

BY_NAME = {entry.name: entry for entry in ENTRIES}
DENSE = ENTRIES[0]

ON_A_SLOW_LINK = ("none", "fp16", "top-k 1 %", "PowerSGD, rank 4")
"""Those that are compared there."""


def add_option(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the option that chooses strategies."""
    names = tuple(BY_NAME)
    parser.add_argument(
        "--strategies", nargs="+", choices=names, default=list(default), metavar="NAME"
    )
