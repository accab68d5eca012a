"""Parts that both forms of Gluon's LeNet share: the options and the ways gradients travel."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import failures

import hvdlite

# Read when TensorFlow is imported, which comes later: each process would print its notices.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

SIDE = 28  # pixels of the images that the network is made for

C = hvdlite.Compression
WAYS = {
    "none": C.none,
    "fp16": C.fp16,
    "2bit": C.ErrorFeedback(C.TwoBit(0.5 / 64)),  # MXNet's 0.5, of means over a rank's 64 images
    "1bit": C.ErrorFeedback(C.Sign()),
    "topk": C.ErrorFeedback(C.TopK(0.05)),
    "powersgd": C.ErrorFeedback(C.PowerSGD(4)),
}


def parse_options(
    description: str,
    arguments: list[str] | None = None,
    add_more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Return the options of the command line; ``add_more`` adds those that only one form has."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add_more(parser)
    add("--loss", choices=("mean", "sum"), default="mean", help="over a batch (%(default)s)")
    add("--compression", choices=WAYS, default="none", help="of gradients (%(default)s)")
    add("--epochs", type=int, default=10, help="(%(default)s)")
    add("--batch-size", type=int, default=128, help="images of all ranks per step (%(default)s)")
    add("--lr", type=float, default=0.04, help="learning rate (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the order of the images")
    options = parser.parse_args(arguments)
    for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')}: found {value}, expected {least} or more")
    return options


def check_batch_size(hvd: Any, options: argparse.Namespace, devices: int = 1) -> None:
    """End the job with one line if the ranks' devices cannot get equal parts of a batch."""
    ranks = hvd.size()
    if options.batch_size % ranks or options.batch_size < 2 * ranks * devices:
        failures.exit_all(
            hvd,
            f"--batch-size {options.batch_size}: found {ranks} ranks of {devices} devices, "
            f"expected a multiple of {ranks}, {2 * ranks * devices} or more",
        )


def report(hvd: Any, epoch: int, training: float, test: float, seconds: float) -> None:
    """Print accuracies and time of an epoch, on rank 0 only."""
    hvd.on_rank_zero(print)(
        f"epoch {epoch + 1}: training accuracy {training:.4f}, "
        f"test accuracy {test:.4f}, {seconds:.2f} s",
        flush=True,
    )
