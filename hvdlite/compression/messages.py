"""Messages of any length to all ranks, and refusals that reach all ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.base.arrays import cut
from hvdlite.compression.bucket import Bucket
from hvdlite.errors import GradientError, ranks_text
from hvdlite.transport import Transport

# The length of a message, and the position of a parameter that cannot be sent, or -1.
_HEADER = struct.Struct("<qq")


def find_not_finite(bucket: Bucket, values: Any, infinite: bool = True) -> int:
    """Return the position of the first parameter with a NaN, or an infinity; -1: none."""
    # One pass over memory suffices for nearly all buckets.
    if np.isfinite(np.add.reduce(values)):
        return -1
    is_bad = (lambda part: ~np.isfinite(part)) if infinite else np.isnan
    for position in range(len(bucket.parameters)):
        if is_bad(bucket.slot(values, position)).any():
            return position
    return -1  # all values are finite; only their sum is too large for the type


def agree(bucket: Bucket, transport: Transport, bad: int, length: int = 0) -> list[int]:
    """Return the lengths of all ranks' messages, by rank, or refuse the bucket on all ranks.

    Args:
        bad: the position of a parameter that this rank cannot send, or -1.
    """
    headers = list(map(_HEADER.unpack, transport.gather(_HEADER.pack(length, bad))))
    where = [rank for rank, (_, position) in enumerate(headers) if position >= 0]
    if where:
        name = bucket.parameters[headers[where[0]][1]].name
        members = ranks_text([transport.members[rank] for rank in where])
        raise GradientError(
            f"rank {transport.members[transport.rank]}: the gradient of {name!r} is not finite on "
            f"{members}, and the compression cannot send that; lower the learning rate or clip "
            "the loss, train in bfloat16 instead of with a GradScaler, which makes gradients "
            "overflow on purpose, or use Compression.none, .fp16 or .bf16, which pass it on"
        )
    return [length for length, _ in headers]


def gather_messages(transport: Transport, message: Any, lengths: Sequence[int]) -> list[Any]:
    """Return every rank's message, by rank."""
    everything = message if transport.size == 1 else np.empty(sum(lengths), np.uint8)
    messages = cut(everything, np.cumsum([0, *lengths]).tolist())
    transport.allgather(message, messages)
    return messages
