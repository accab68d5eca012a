"""Gradients drawn by lot."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdlite.arguments import check_count, check_ratio
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.messages import agree, find_not_finite
from hvdlite.compression.quantised import generator_of
from hvdlite.compression.sparse import part_of
from hvdlite.compression.strategy import Strategy
from hvdlite.engine.agreement import ranks_text
from hvdlite.errors import MismatchError
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport


@dataclass(frozen=True, repr=False)
class RandomK(Strategy):
    """Send entries drawn by lot: in each step others, the same on all ranks.

    All ranks draw the same lots, so that only values travel, and are added up on their way: of
    ``ratio`` of the gradients' bytes. Stich et al. 2018, arXiv:1809.07599.

    Infinities are refused, as is what is not a number: what is not drawn would stay in residuals.

    Args:
        ratio: how much of a bucket, above 0 and at most 1; rounded up, so at least one entry.
        seed: of the lots, 0 or above.
        unbiased: whether what is sent is multiplied by n/k, for k of n entries: then its
            expectation is the gradient, and nothing remains for `ErrorFeedback` to send, which
            refuses it.

    Raises:
        ValueError: an argument is out of range.
    """

    ratio: float = 0.01
    seed: int = 0
    unbiased: bool = False

    stateful = True  # for the number of the step

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_count("seed", self.seed, 0)

    @property
    def tells_unsent(self) -> bool:  # type: ignore[override]
        """Unless what is sent is more than there was."""
        return not self.unbiased

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Draw, reduce what is drawn."""
        size = bucket.send.size
        indices = _draw(generator_of(bucket, self.seed), size, part_of(size, self.ratio))
        lots = zlib.crc32(indices)
        found = agree(bucket, transport, find_not_finite(bucket, bucket.send), lots)
        _check(transport, bucket, found)
        scaling = bucket.reduction.whole(transport.size)
        if self.unbiased and size:
            scaling = replace(scaling, factor=size / indices.size)
        values = bucket.send[indices]
        if indices.size:
            transport.allreduce(values, values, ReduceOp.SUM, scaling)
        if bucket.unsent is not None:
            bucket.unsent[...] = bucket.send
            bucket.unsent[indices] = 0
        bucket.result[...] = 0
        bucket.result[indices] = values


def _draw(generator: np.random.Generator, size: int, count: int) -> Any:
    """Draw ``count`` of ``size`` indices, each set of them as likely; in increasing order.

    One after the other they are put down until there are enough different ones, or, where it is
    most of them, until those that are left out are enough.
    """
    fewer = min(count, size - count)
    drawn = np.zeros(size, np.bool_)
    missing = fewer
    while missing:
        drawn[generator.integers(size, size=missing)] = True
        missing = fewer - np.count_nonzero(drawn)
    return np.flatnonzero(drawn if fewer == count else ~drawn)


def _check(transport: Transport, bucket: Bucket, lots: list[int]) -> None:
    """Compare what all ranks have drawn, since sums of different entries would be wrong.

    Raises:
        MismatchError: on all ranks, if it differs.
    """
    others = [transport.members[rank] for rank, drawn in enumerate(lots) if drawn != lots[0]]
    if others:
        raise MismatchError(
            f"rank {transport.members[transport.rank]}: for the bucket of "
            f"{bucket.parameters[0].name!r}, RandomK has drawn other entries on "
            f"{ranks_text(others)} than on rank {transport.members[0]}; install the same version "
            "of numpy on all ranks"
        )
