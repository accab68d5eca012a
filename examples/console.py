"""What the training scripts share: their options, how they end, and what they report."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm


def parse_options(description: str) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add("--epochs", type=_positive, help="default: 30, for MNIST 6")
    add("--steps", type=_positive, help="stop after so many optimizer steps")
    add("--batch-size", type=_positive, default=32, help="images per process and step")
    add("--lr", type=float, default=0.05, help="learning rate of one process")
    add("--warmup-epochs", type=float, default=1.0, help="until the scaled rate is reached")
    add("--seed", type=int, default=0)
    add("--compression", choices=("none", "fp16", "bf16"), default="none")
    add("--checkpoint-dir", help="save each epoch there, and resume from there")
    add("--json", action="store_true", help="end with a line of JSON on standard output")
    return parser.parse_args()


def progress(hvd: Any, total: int, done: int) -> tqdm:
    """Return a progress bar over the steps of the training, visible on rank 0 only."""
    return tqdm(total=total, initial=done, unit="step", ncols=100, disable=hvd.rank() != 0)


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


def agreed_sha256(hvd: Any, weights: Iterable[np.ndarray]) -> str:
    """Return the hash of the weights, or end the job if two ranks have different ones."""
    digest = hashlib.sha256()
    for array in weights:
        digest.update(np.ascontiguousarray(array))
    hashes = hvd.allgather_object(digest.hexdigest())
    if len(set(hashes)) > 1:
        found = ", ".join(f"rank {rank}: {sha256[:8]}" for rank, sha256 in enumerate(hashes))
        exit_all(hvd, f"the ranks have different weights after the training ({found})")
    return hashes[0]


def report(hvd: Any, as_json: bool, result: dict[str, Any]) -> None:
    """Print the result on rank 0."""
    if hvd.rank() != 0:
        return
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print(", ".join(f"{key}: {_readable(value)}" for key, value in result.items()), flush=True)


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
    return f"{value:.4g}" if isinstance(value, float) else str(value)
