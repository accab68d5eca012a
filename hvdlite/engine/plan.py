"""Which gradients travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np


class Sized(Protocol):
    """What a plan needs to know of a parameter."""

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of its gradient; a bucket has one."""


def plan_buckets(
    parameters: Sequence[Sized],
    cap: int,
    first_cap: int,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Pack parameters into buckets in the reverse of their order.

    Gradients come about in that order, so the first bucket is complete first; it is small,
    so that exchange starts early (Li et al. 2020, arXiv:2006.15704).

    Args:
        parameters: in the order of their registration.
        cap: bytes after which a bucket is closed.
        first_cap: the same for the first one.
        kinds: of the parameters; only those of one kind and dtype share a bucket. None: all do.

    Returns:
        Positions in ``parameters``; for each bucket one list, in the order of exchange.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for position in reversed(range(len(parameters))):
        parameter = parameters[position]
        kind = parameter.dtype.name, None if kinds is None else kinds[position]
        members, filled = open_buckets.pop(kind, ([], 0))
        members.append(position)
        filled += parameter.nbytes
        if filled >= (cap if buckets else min(cap, first_cap)):
            buckets.append(members)
        else:
            open_buckets[kind] = (members, filled)
    buckets += [members for members, _ in open_buckets.values()]
    return buckets
