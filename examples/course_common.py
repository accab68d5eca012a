"""Parts that the course's scripts share: options, data that may be missing, and the report."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import digits

# Read when TensorFlow is imported, which comes later: each process would print its notices.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_options(
    description: str, add_more: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """Return the options of the command line.

    Args:
        description: of the script; its first line is shown.
        add_more: adds the options that only this script has.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add("--epochs", type=positive, default=5)
    add("--batch-size", type=positive, default=32, help="images per process and step")
    add("--lr", type=float, default=0.02, help="learning rate of one process")
    add("--seed", type=int, default=1)
    add("--checkpoint", help="file to write after each epoch")
    if add_more:
        add_more(parser)
    return parser.parse_args()


def parse_benchmark_options(description: str) -> argparse.Namespace:
    """Return the options of the command line of a benchmark on synthetic images."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = parser.add_argument
    add("--num_steps", "--num-steps", type=positive, default=20, help="steps that are timed")
    add("--batch_size", "--batch-size", type=positive, default=16, help="images per rank and step")
    add("--image_size", "--image-size", type=positive, default=64, help="224 in the paper")
    add("--width", type=positive, default=64, help="channels of the first convolution")
    add("--json", action="store_true", help="end with a line of JSON on standard output")
    return parser.parse_args()


def report_rates(hvd: Any, seconds: Sequence[float], options: argparse.Namespace) -> None:
    """Print on rank 0 how many images all ranks together take per second, in each step.

    Args:
        hvd: the adapter of the framework.
        seconds: of each timed step; the exchange keeps the ranks in step, so they are about the
            same on all ranks.
        options: of the command line.
    """
    if hvd.rank():
        return
    rates = [hvd.size() * options.batch_size / each for each in seconds]
    for number, rate in enumerate(rates, start=1):
        print(f"step {number}: {rate:.1f} images/s")
    mean, deviation = statistics.mean(rates), statistics.pstdev(rates)
    print(f"{ranks(hvd.size())}: {mean:.1f} +- {deviation:.1f} images/s over {len(rates)} steps")
    if options.json:
        print(json.dumps({"ranks": hvd.size(), "images_per_s": mean, "deviation": deviation}))


def ranks(size: int) -> str:
    """Return the number of ranks in words."""
    return f"{size} rank{'s' * (size > 1)}"


def positive(text: str) -> int:
    """Return a number of the command line, which has to be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def load_digits(data_dir: str | None, hvd: Any = None) -> digits.Digits:
    """Load the digits, or end the job with one line if a rank cannot.

    Args:
        data_dir: the option.
        hvd: the adapter of the framework; None: this process is alone.
    """
    data, failure = None, None
    try:
        data = digits.load(data_dir)
    except digits.DataError as error:
        failure = str(error)
    failures = hvd.allgather_object(failure) if hvd else [failure]
    for rank, text in enumerate(failures):
        if text:
            exit_all(hvd, text if None not in failures else f"{text} (on rank {rank})")
    return data


def exit_all(hvd: Any, message: str) -> NoReturn:
    """End the job with one line on standard error; every rank calls this."""
    if not hvd or hvd.rank() == 0:
        print(message, file=sys.stderr, flush=True)
    if hvd:
        # mpirun ends the job as soon as one rank fails: the line has to be out before.
        hvd.barrier()
    sys.exit(1)
