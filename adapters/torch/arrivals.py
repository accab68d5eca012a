"""Which gradients of a bucket have come in the current step, and how one hears of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Steps in which the quick way did not do, after which it is not taken again.
_MOST_SETBACKS = 3
# With fewer gradients than this it is not worth while.
_FEWEST = 4


class Arrivals:
    """The gradients of one bucket as they come.

    At first a hook in Python tells of each. Where all came so, the next step goes the quick
    way: of the small ones only the last to come has such a hook, which finds out that it is
    the last, and the others' is a function of C, ``quick.append``. A hook in Python takes
    twice as long, and pushes the backward pass out of the processor's caches besides.

    Args:
        members: of the bucket, by number.
        small: those of them that nothing has to be done for as soon as they come.

    Attributes:
        members: as given.
        told: those that a hook has told of and that have not been passed on, by number.
        quick: those that have come without such a hook, and have not been passed on either.
        quick_members: those that come so in this step, by number.
        absent: how many no hook has told of.
        streams: of a device, on which they have come.
    """

    def __init__(self, members: Sequence[int], small: Sequence[int]) -> None:
        self.members = members
        self._small = small
        self.quick: list[torch.Tensor] = []
        self.quick_members: list[int] = []
        self._setbacks = 0
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self.told: list[int] = []
        self.quick.clear()
        self.absent = len(self.members)
        self.streams: set[int] = set()
        self._last: int | None = None

    @property
    def begun(self) -> bool:
        """Whether there is something to pass on."""
        return bool(self.told or self.quick)

    def tell(self, number: int) -> bool:
        """Take note of one; return whether all have come."""
        self.told.append(number)
        self.absent -= 1
        if self.absent > len(self.quick):
            return False
        self._last = number
        return True

    def next_quick(self) -> list[int]:
        """Who should come quickly in the next step, after what this one was like."""
        if self._last is None:  # some did not come, or whoever was the last has no hook
            self._setbacks += bool(self.quick_members)
            return []
        small = self._small
        if self.quick_members or self._setbacks >= _MOST_SETBACKS or len(small) < _FEWEST:
            return self.quick_members
        return [number for number in small if number != self._last]
