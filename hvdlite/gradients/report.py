"""What ranks tell each other of a bucket when they meet for its exchange."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.engine.agreement import ranks_text
from hvdlite.errors import GradientError
from hvdlite.reduction import ReduceOp

# What is said of a gradient; a sparse one is DENSE and the number of its sparse axes, which a rank
# that has no gradient has to know.
ABSENT, DENSE = 0, 1
# Said of all gradients where parameters are not any more what the ranks have compared.
CONVERTED = 255

ONLY_AVERAGES = "batch_size weights averages; use op=hvd.Average, or leave it out"

# How many exchanges have gone before, and of how many samples the gradients are; -1: not said.
_NUMBERS = struct.Struct("<qq")
_MOST_SAMPLES = 2**53  # floats, of which weights are made, know no greater odd number


class Report(NamedTuple):
    """What all ranks have told.

    Attributes:
        kinds: numbers of shape (ranks, parameters): 0 where a rank has no gradient, 1 for a dense
            one, and for a sparse one 1 more than its sparse axes.
        exchanges: how many exchanges of the bucket have gone before.
        weights: what each rank's gradients are multiplied by, by rank; None: all count alike.
    """

    kinds: Any
    exchanges: int
    weights: Any

    @property
    def absent(self) -> list[int]:
        """Positions of parameters of which no rank has a dense gradient."""
        present: list[int] = np.flatnonzero(~(self.kinds == DENSE).any(axis=0)).tolist()
        return present

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to exchange."""
        return not (self.kinds == DENSE).any()


def checked_samples(batch_size: Any) -> int | None:
    """Return how many samples a gradient is the average of, or None.

    Args:
        batch_size: as the user gives it: any kind of number, array or tensor of one element.

    Raises:
        ValueError: it is no whole number from 0 on.
    """
    if batch_size is None:
        return None
    try:
        number = -1 if isinstance(batch_size, (str, bytes)) else int(batch_size)
        is_whole = 0 <= number <= _MOST_SAMPLES and number == float(batch_size)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"batch_size={batch_size!r} is not a whole number from 0 on; give the number of "
            "samples that this rank's gradients are averages of"
        )
    return number


def check_weighted(op: ReduceOp) -> None:
    """Refuse to weight by numbers of samples what is no average.

    Raises:
        ValueError: it is another reduction.
    """
    if op is not ReduceOp.AVERAGE:
        raise ValueError(ONLY_AVERAGES)


def check_not_local(batch_size: Any) -> None:
    """Refuse to weight other ranks' gradients beside local ones, which are divided by their number.

    Raises:
        ValueError: there is a number of samples.
    """
    if batch_size is not None:
        raise ValueError(
            "batch_size weights the gradients of all ranks, and those of local variables are "
            "divided by the number of ranks, whatever their batches; pass "
            "scale_local_gradients=False and weight these yourself, or leave batch_size out"
        )


def write(
    kinds: bytes | bytearray, exchanges: int | None, samples: int | None, replica: bytes = b""
) -> bytes:
    """Return a rank's report.

    Args:
        kinds: one for each parameter.
        exchanges: those that have gone before; None: that is of no interest.
        samples: of which the gradients are averages; None: all ranks' count alike.
        replica: the digest of the rank's replica, if it is to be compared.
    """
    if exchanges is None and samples is None and not replica:
        return bytes(kinds)
    numbers = _NUMBERS.pack(exchanges or 0, -1 if samples is None else samples)
    return bytes(kinds) + numbers + replica


def read_replicas(payloads: Sequence[bytes], parameters: int) -> list[bytes]:
    """Return the digests of the ranks' replicas, by rank; empty where there is none."""
    return [payload[parameters + _NUMBERS.size :] for payload in payloads]


def read(payloads: Sequence[bytes], parameters: int, members: Sequence[int]) -> Report:
    """Put all ranks' reports together, alike on every rank.

    A rank that has joined, whose payload is empty, counts as one that has what any has, of no
    samples.

    Args:
        payloads: by rank.
        parameters: how many there are.
        members: by what numbers messages call the ranks.

    Raises:
        GradientError: some ranks tell numbers of samples and others do not, or all have none.
    """
    here = np.frombuffer(b"".join(payload[:parameters] for payload in payloads), np.uint8)
    rows = iter(here.reshape(-1, parameters))
    anywhere = here.reshape(-1, parameters).max(axis=0)
    kinds = np.array([next(rows) if payload else anywhere for payload in payloads])
    if all(len(payload) in (0, parameters) for payload in payloads):
        return Report(kinds, 0, None)
    numbers = [
        _NUMBERS.unpack_from(payload, parameters) if len(payload) > parameters else (0, -1)
        for payload in payloads
    ]
    exchanges = max(before for before, _ in numbers)
    present = [rank for rank, payload in enumerate(payloads) if payload]
    samples = [numbers[rank][1] for rank in range(len(payloads))]
    if all(samples[rank] < 0 for rank in present):
        return Report(kinds, exchanges, None)
    return Report(kinds, exchanges, _weights(samples, present, members))


def _weights(samples: Sequence[int], present: Sequence[int], members: Sequence[int]) -> Any:
    silent = [members[rank] for rank in present if samples[rank] < 0]
    if silent:
        raise GradientError(
            f"{ranks_text(silent)} gave no batch_size where the others did; give it in every step "
            "on all ranks, or on none"
        )
    counts = np.array([max(count, 0) for count in samples], np.float64)
    if not counts.any():
        raise GradientError(
            "batch_size is 0 on all ranks, so there is nothing to average; leave such a step out"
        )
    return counts * len(counts) / counts.sum()
