"""Parts that both forms of SINGA's CNN share: the options, the start and the report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import digits

import hvdlite

# Read when TensorFlow is imported, which comes later: each process would print its notices.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# SINGA's names, and hvdlite's presets of the same names.
MODES = ("fp32", "fp16", "partialUpdate", "sparseTopK", "sparseThreshold")
SIDE = 28  # pixels of the images that the network is made for


def parse_options(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, and as ``compression`` SINGA's mode."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add("--dist-option", choices=MODES, default=MODES[0], help="how ranks exchange (%(default)s)")
    add(
        "--spars",
        type=float,
        default=0.05,
        help="sparseTopK: fraction to send; sparseThreshold: threshold (%(default)s)",
    )
    add("--epochs", type=int, default=10, help="(%(default)s)")
    add("--batch-size", type=int, default=64, help="images per rank and step (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the order of the images")
    add("--spawn", type=int, default=0, metavar="N", help="start N processes, without a launcher")
    options = parser.parse_args(arguments)
    for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0), ("spawn", 0)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')}: found {value}, expected {least} or more")
    try:
        options.compression = hvdlite.singa(options.dist_option, options.spars)
    except ValueError as error:
        parser.error(f"--spars: {error}")
    return options


def start(train: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Train on the ranks of a launcher, or on processes that this one starts."""
    if not options.spawn:
        train(options)
        return
    try:
        digits.load(options.data_dir)  # a mistake ends the script before processes start
    except digits.DataError as error:
        sys.exit(str(error))
    hvdlite.spawn(lambda number: train(options), options.spawn)


def report_training(hvd: Any, loss_sum: float, correct: int, images: int) -> None:
    """Print the sum of all steps' and ranks' losses, as SINGA does, and the accuracy."""
    total = hvd.sum_metrics({"loss": loss_sum, "correct": correct})
    accuracy = total["correct"] / images
    say(hvd, f"Training loss = {total['loss']:.6f}, training accuracy = {accuracy:.6f}")


def report_evaluation(hvd: Any, correct: int, images: int, seconds: float) -> None:
    """Print the accuracy over the test images of all ranks, and the time of the epoch."""
    accuracy = hvd.sum_metrics({"correct": correct})["correct"] / images
    say(hvd, f"Evaluation accuracy = {accuracy:.6f}, Elapsed Time = {seconds:.6f}s")


def say(hvd: Any, line: str) -> None:
    """Print a line, on rank 0 only."""
    hvd.on_rank_zero(print)(line, flush=True)
