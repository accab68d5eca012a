"""The metadata of a bucket: what ranks tell each other when they meet for its exchange."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.base.reduction import ReduceOp
from hvdlite.errors import GradientError, ranks_text
from hvdlite.gradients.replicas import REPLICA_DIGEST_SIZE

# The kind of a gradient: IN_SLOT if it is in its slot, plus twice the number of its sparse axes,
# which a rank without a gradient has to know.
ABSENT, IN_SLOT = 0, 1
# The kind of all gradients if the parameters are no longer what the ranks have compared.
CONVERTED = 254

ONLY_AVERAGES = "batch_size weights averages; use op=hvd.Average, or leave it out"

# The number of previous exchanges, and the number of samples; -1: not given.
_NUMBERS = struct.Struct("<qq")
_MOST_SAMPLES = 2**53  # weights are floats, which represent no greater odd number


class Metadata(NamedTuple):
    """The metadata of all ranks.

    Attributes:
        kinds: array of shape (ranks, parameters), of each rank's gradients.
        absent: positions of parameters of which no rank has a gradient in its slot.
        exchanges: the number of previous exchanges of the bucket.
        weights: the factor of each rank's gradients, by rank; None: all count the same.
    """

    kinds: Any
    absent: list[int]
    exchanges: int = 0
    weights: Any = None

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to exchange."""
        return len(self.absent) == len(self.kinds[0])


def checked_samples(batch_size: Any) -> int | None:
    """Return the number of samples that a gradient is the average of, or None.

    Args:
        batch_size: as the user gives it: any kind of number, array or tensor of one element.

    Raises:
        ValueError: it is not a whole number from 0 on.
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
    """Require an average: only averages can be weighted by numbers of samples."""
    if op is not ReduceOp.AVERAGE:
        raise ValueError(ONLY_AVERAGES)


def check_not_local(batch_size: Any) -> None:
    """Refuse weights beside local gradients, which are divided by the number of ranks."""
    if batch_size is not None:
        raise ValueError(
            "batch_size weights the gradients of all ranks, and those of local variables are "
            "divided by the number of ranks, whatever their batches; pass "
            "scale_local_gradients=False and weight these yourself, or leave batch_size out"
        )


def encode(
    kinds: bytes | bytearray, exchanges: int | None, samples: int | None, replica: bytes = b""
) -> bytes:
    """Return the metadata of this rank.

    Args:
        kinds: one for each parameter.
        exchanges: the number of previous exchanges; None: the strategy does not need it.
        samples: the number of samples that the gradients are averages of; None: all ranks count
            the same.
        replica: the digest of the rank's replica, if it is compared.
    """
    if exchanges is None and samples is None:
        return bytes(kinds) + replica
    numbers = _NUMBERS.pack(exchanges or 0, -1 if samples is None else samples)
    return bytes(kinds) + numbers + replica


def split_replica(payload: bytes, parameters: int) -> tuple[bytes, bytes]:
    """Return a rank's metadata as `decode` takes it, and the digest of its replica, or b""."""
    length = len(payload) - parameters
    stop = parameters + (_NUMBERS.size if length % REPLICA_DIGEST_SIZE else 0)
    return payload[:stop], payload[stop:]


def decode(payloads: Sequence[bytes], parameters: int, members: Sequence[int]) -> Metadata:
    """Combine the metadata of all ranks; the result is the same on every rank.

    A joined rank has an empty payload. It counts as a rank with 0 samples that has every gradient
    that another rank has.

    Raises:
        GradientError: some ranks give numbers of samples and others do not, or all have none.
    """
    here = np.frombuffer(b"".join(payload[:parameters] for payload in payloads), np.uint8)
    rows = here.reshape(-1, parameters)
    kinds = rows
    if len(rows) < len(payloads):
        anywhere = rows.max(axis=0)
        given = iter(rows)
        kinds = np.array([next(given) if payload else anywhere for payload in payloads])
    absent: list[int] = np.flatnonzero(~(kinds & IN_SLOT).any(axis=0)).tolist()
    if all(len(payload) in (0, parameters) for payload in payloads):
        return Metadata(kinds, absent)
    numbers = [
        _NUMBERS.unpack_from(payload, parameters) if len(payload) > parameters else (0, -1)
        for payload in payloads
    ]
    exchanges = max(before for before, _ in numbers)
    present = [rank for rank, payload in enumerate(payloads) if payload]
    samples = [numbers[rank][1] for rank in range(len(payloads))]
    if all(samples[rank] < 0 for rank in present):
        return Metadata(kinds, absent, exchanges)
    return Metadata(kinds, absent, exchanges, _weights(samples, present, members))


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
