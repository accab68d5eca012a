"""The greatest gradients only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvdlite.arguments import check_choice, check_count, check_ratio
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.selection import greatest
from hvdlite.compression.sparse import Sparse, greatest_of_each, part_of

_RATIO = 0.01


@dataclass(frozen=True, repr=False)
class TopK(Sparse):
    """Send the entries of the greatest magnitude; of equal ones, those that come first.

    To be used with `ErrorFeedback`, without which small gradients are never sent: Stich et al.
    2018, arXiv:1809.07599; Aji and Heafield 2017, arXiv:1704.05021. It sends fewer bytes than a
    dense exchange of n ranks where less than one entry in n is sent.

    Args:
        ratio: how much of all, above 0 and at most 1; rounded up, so at least one entry. One
            percent if neither it nor ``count`` is given.
        count: how many entries, instead of a ratio; at least 1.
        per: ``"bucket"``: of all gradients that travel together; ``"tensor"``: of each gradient,
            however small its entries are beside those of others.

    Raises:
        ValueError: an argument is out of range, or both a ratio and a count are given.
    """

    ratio: float | None = None
    count: int | None = None
    per: Literal["bucket", "tensor"] = "bucket"

    def __post_init__(self) -> None:
        if self.ratio is not None and self.count is not None:
            raise ValueError(f"ratio={self.ratio!r} and count={self.count!r}; give one of them")
        check_choice("per", self.per, "bucket", "tensor")
        if self.count is not None:
            check_count("count", self.count)
        if self.ratio is None and self.count is None:
            object.__setattr__(self, "ratio", _RATIO)
        if self.ratio is not None:
            check_ratio("ratio", self.ratio)

    def select(self, bucket: Bucket) -> Any:
        """The greatest of all, or of each parameter."""
        if self.per == "bucket":
            return greatest(bucket.send, self._count(bucket.send.size))
        counts = [self._count(parameter.size) for parameter in bucket.parameters]
        return greatest_of_each(bucket, bucket.send, counts)

    def _count(self, size: int) -> int:
        return part_of(size, self.ratio or _RATIO) if self.count is None else self.count
