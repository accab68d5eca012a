"""The steps of a training, and the learning rate's way to zero."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator


class Plan:
    """The steps of a training.

    Args:
        options: those of the command line.
        steps_per_epoch: optimizer steps, the same on all ranks.

    Attributes:
        steps: in all epochs; the learning rate is planned for them.
        warmup_steps: until the learning rate is scaled.
        last_step: where the training stops; less than ``steps`` if ``--steps`` says so.
    """

    def __init__(self, options: argparse.Namespace, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.steps = options.epochs * steps_per_epoch
        self.warmup_steps = options.warmup_epochs * steps_per_epoch
        self.last_step = min(options.steps or self.steps, self.steps)

    def epochs(self, first: int) -> Iterator[tuple[int, range]]:
        """Yield the epochs from the given one on, and the steps of each."""
        for epoch in range(first, math.ceil(self.last_step / self.steps_per_epoch)):
            start = epoch * self.steps_per_epoch
            yield epoch, range(start, min(start + self.steps_per_epoch, self.last_step))

    def decay(self, step: int) -> float:
        """Return the factor of the learning rate, which falls linearly from 1 to 0."""
        return 1 - step / self.steps
