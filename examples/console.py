"""Shared parts of the training scripts: options, progress, the end and the report."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import digits
import numpy as np
from tqdm import tqdm

# Read when TensorFlow is imported, which comes later: each process would print its notices.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_options(
    description: str,
    add_more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    compressions: Sequence[str] = ("none", "fp16", "bf16"),
) -> argparse.Namespace:
    """Return the options of the command line.

    Args:
        description: of the script; its first line is shown.
        add_more: adds the options that only this script has.
        compressions: the names that ``--compression`` takes, the default first.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add_more(parser)
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add("--epochs", type=_positive, help="default: 30, for MNIST 6")
    add("--steps", type=_positive, help="stop after so many optimizer steps")
    add("--batch-size", type=_positive, default=32, help="images per process and step")
    add("--lr", type=float, default=0.03, help="learning rate of one process")
    add("--warmup-epochs", type=float, help="until the rate is scaled; default: a sixth of all")
    add("--seed", type=int, default=1)
    add("--compression", choices=compressions, default=compressions[0])
    add("--checkpoint-dir", help="save each epoch there, and resume from there")
    add("--json", action="store_true", help="end with a line of JSON on standard output")
    options = parser.parse_args()
    options.epochs = options.epochs or (6 if options.data_dir else 30)
    if options.warmup_epochs is None:
        options.warmup_epochs = options.epochs / 6
    return options


def load_data(hvd: Any, data_dir: str | Path | None) -> digits.Digits:
    """Load the digits on every rank, or end the job with one line if a rank cannot."""
    return agree(hvd, lambda: digits.load(data_dir), digits.DataError)


def agree(hvd: Any, load: Callable[[], Any], expected: type[Exception]) -> Any:
    """Load something on every rank, or end the job with one line if a rank cannot.

    Args:
        hvd: the adapter of the framework.
        load: returns it.
        expected: the error whose message is that line.
    """
    data, failure = None, None
    try:
        data = load()
    except expected as error:
        failure = str(error)
    failures = {rank: text for rank, text in enumerate(hvd.allgather_object(failure)) if text}
    if failures:
        rank, text = min(failures.items())
        where = "" if len(failures) == hvd.size() else f" (on rank {rank})"
        exit_all(hvd, f"{text}{where}")
    return data


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


def progress(hvd: Any, done: int, total: int) -> tqdm:
    """Return a progress bar over the steps of the training, visible on rank 0 only."""
    return tqdm(
        initial=done,
        total=total,
        unit="step",
        ncols=90,
        mininterval=0.5,
        disable=hvd.rank() != 0,
    )


def images_per_s(hvd: Any, timings: list[tuple[int, float]]) -> float | None:
    """Return how many images all processes together take per second.

    Args:
        hvd: the adapter of the framework.
        timings: this process's images and seconds in each epoch. The first epoch, in which
            frameworks compile and warm up, counts only if it is the only one.
    """
    timed = timings[1:] or timings
    if not timed:
        return None
    images = sum(hvd.allgather_object(sum(count for count, _ in timed)))
    return images / sum(seconds for _, seconds in timed)


def compare_weights(hvd: Any, weights: Iterable[Any]) -> tuple[str, bool]:
    """Return the hash of this rank's weights, and whether all ranks have the same.

    Args:
        hvd: the adapter of the framework.
        weights: arrays, or tensors on the host.
    """
    digest = hashlib.sha256()
    for array in weights:
        digest.update(np.ascontiguousarray(array))
    hashes = hvd.allgather_object(digest.hexdigest())
    return digest.hexdigest(), len(set(hashes)) == 1


def report(hvd: Any, as_json: bool, result: dict[str, Any]) -> None:
    """Print the result on rank 0, and end the job if the ranks' weights differ."""
    if hvd.rank() == 0 and as_json:
        print(json.dumps(result), flush=True)
    elif hvd.rank() == 0:
        print(", ".join(f"{key}: {_readable(value)}" for key, value in result.items()), flush=True)
    if not result["identical"]:
        exit_all(hvd, "the ranks have different weights after the training")


def exit_all(hvd: Any, message: str) -> NoReturn:
    """End the job with one line on standard error; every rank calls this."""
    if hvd.rank() == 0:
        print(message, file=sys.stderr, flush=True)
    # mpirun ends the job as soon as one rank fails: the line has to be out before.
    hvd.barrier()
    sys.exit(1)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def _readable(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
