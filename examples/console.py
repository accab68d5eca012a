"""Shared parts of the training scripts: the options and the report."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from failures import exit_all

# Read when TensorFlow is imported, which comes later: each process would print its notices.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parse_options(
    description: str,
    add_more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    compressions: Sequence[str] = ("none", "fp16", "bf16"),
) -> argparse.Namespace:
    """Return the options of the command line; ``add_more`` adds those that only one script has."""
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


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{int(text)} is not above 0")
    return int(text)


def report(hvd: Any, as_json: bool, result: dict[str, Any], weights: Iterable[Any]) -> None:
    """Print the result on rank 0, with a hash of its weights; end the job if ranks have others."""
    sha256 = hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in weights))
    hashes = hvd.allgather_object(sha256.hexdigest())
    result = {**result, "weights_sha256": hashes[0], "identical": len({*hashes}) == 1}
    words = (f"{k}: {v:.5g}" if isinstance(v, float) else f"{k}: {v}" for k, v in result.items())
    hvd.on_rank_zero(print)(json.dumps(result) if as_json else ", ".join(words), flush=True)
    if not result["identical"]:
        exit_all(hvd, "the ranks have different weights after the training")
