"""Parts that both solutions of the course's homework share: the options, the table and the plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import course_common
import course_plot
from digits import Digits

# Trains once with so many warm-up epochs; returns accuracies and the mean seconds of an epoch.
Train = Callable[[Digits, float, argparse.Namespace], tuple[course_plot.Accuracies, float]]


def parse_options(description: str) -> argparse.Namespace:
    """Return the options of the command line.

    An epoch of scikit-learn's 1,437 digits has a fourteenth of the steps that one of 20,000 images
    has, so without MNIST there are more epochs, and the warm-up takes half of them in both cases.
    """

    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--warmup-epochs",
            type=float,
            nargs="+",
            help="a training each; default: 0, half of all",
        )
        add("--output-dir", default=".", help="folder of the plot; created if needed")
        add("--formats", nargs="+", default=["pdf"], choices=("pdf", "png", "svg"))
        parser.set_defaults(epochs=None, lr=0.05)

    options = course_common.parse_options(description, add_options)
    options.epochs = options.epochs or (6 if options.data_dir else 30)
    options.warmup_epochs = options.warmup_epochs or [0, options.epochs / 2]
    course_plot.check_matplotlib()
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    return options


def compare(hvd: Any, train: Train, options: argparse.Namespace) -> None:
    """Train with and without warm-up, print a table and draw the curves.

    Args:
        hvd: the adapter of the framework, initialised.
        train: trains once.
        options: of the command line.
    """
    log = hvd.on_rank_zero(print)
    data = course_common.load_digits(options.data_dir, hvd)
    curves = {}
    log("| ranks | warm-up epochs | s per epoch | images/s | training | validation |")
    log("|---|---|---|---|---|---|")
    for warmup_epochs in options.warmup_epochs:
        accuracies, seconds = train(data, warmup_epochs, options)
        curves[f"{warmup_epochs:g} warm-up epochs"] = accuracies
        log(
            f"| {hvd.size()} | {warmup_epochs:g} | {seconds:.2f} "
            f"| {len(data.train.labels) / seconds:.0f} "
            f"| {accuracies.training[-1]:.4f} | {accuracies.validation[-1]:.4f} |",
            flush=True,
        )

    names = (f"accuracy_{hvd.size()}.{suffix}" for suffix in options.formats)
    rate = f"rate {options.lr:g} x {hvd.size()}"
    title = f"{course_common.ranks(hvd.size())}, batch {options.batch_size} each, {rate}"
    files = [Path(options.output_dir, name) for name in names]
    hvd.on_rank_zero(course_plot.plot)(curves, title, files)


def with_rates(
    batches: Iterable[Any], rate: Callable[[float], float], epoch: int, use: Callable[[float], None]
) -> Iterator[Any]:
    """Yield the batches of an epoch, and use the learning rate of each step before it."""
    for step, batch in enumerate(batches):
        use(rate(epoch + step / len(batches)))
        yield batch


def mean_of_later(seconds: list[float]) -> float:
    """Return the mean, without that of the first epoch, in which memory is allocated."""
    timed = seconds[1:] or seconds
    return sum(timed) / len(timed)
