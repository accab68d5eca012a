"""Objects that depend on the rank and the number of ranks, and change with them.

When a rank dies under ``hvdliterun --elastic``, the others take over its share of the data
(`hvdlite.recipe.batches`). They may have come to different steps, so the ranks compare how far they
are, in `hvdlite.recovery`, and all change at the step that follows the last one that any has taken.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

#: Held while the ranks compare how far they are; a member holds it while it moves on.
lock = threading.RLock()


class Member(ABC):
    """An object with a position that all ranks come to, such as a step in the data."""

    @abstractmethod
    def position(self) -> Any:
        """Return how far this rank is: picklable, and greater the farther it is."""

    @abstractmethod
    def renumber(self, after: Any, rank: int, size: int) -> None:
        """Take on a new rank and a new number of ranks.

        Args:
            after: The last position with the old ones.
            rank: This process's new rank.
            size: The new number of ranks.
        """


_members: WeakValueDictionary[tuple[Hashable, int], Member] = WeakValueDictionary()
_counts: dict[Hashable, Iterator[int]] = defaultdict(itertools.count)


def join(member: Member, key: Hashable) -> None:
    """Have an object follow the ranks for as long as it lives.

    Args:
        member: The object.
        key: The same for the corresponding objects of all ranks; those of one key correspond in
            the order of their creation.
    """
    _members[key, next(_counts[key])] = member


def positions() -> dict[tuple[Hashable, int], Any]:
    """Return the positions of this rank's objects; called with `lock` held."""
    return {key: member.position() for key, member in _members.items()}


def renumber(everywhere: Sequence[Mapping[Any, Any]], rank: int, size: int) -> None:
    """Give all objects new numbers; called with `lock` held.

    Args:
        everywhere: The `positions` of all ranks that are left.
        rank: This process's new rank.
        size: The new number of ranks.
    """
    for key, member in list(_members.items()):
        after = max(positions[key] for positions in everywhere if key in positions)
        member.renumber(after, rank, size)
