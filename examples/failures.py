"""Failures that a user can remedy: one line for the whole job, and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import digits


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


def exit_all(hvd: Any, message: str) -> NoReturn:
    """End the job with one line on standard error; every rank calls this."""
    if hvd.rank() == 0:
        print(message, file=sys.stderr, flush=True)
    # mpirun ends the job as soon as one rank fails: the line has to be out before.
    hvd.barrier()
    sys.exit(1)
