"""Membership: objects that depend on the rank and the number of ranks, and change with them.

After a death (``engine/supervisor.py``) the survivors take over the rank's data
(``recipe/batches.py``). They may have reached different steps, so ``elastic/recovery.py`` compares
their positions, and all change after the last step that any of them has taken. An object that a
rank makes later goes through the same changes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from hvdlite.world import world

#: Held while the ranks compare their positions, until they have new numbers; a member holds it
#: while it advances.
lock = threading.RLock()

#: What decides which samples this rank gets (their number, the batch size, the seed, the epoch, a
#: checksum), of the data of which it has taken some last: equal on all ranks. None: nothing has
#: divided the data.
division: Hashable = None


class Member(ABC):
    """An object with a position that all ranks reach, such as a step in the data."""

    @abstractmethod
    def position(self) -> Any:
        """Return the position of this rank: picklable, and ascending."""

    @abstractmethod
    def begin(self, rank: int, size: int) -> None:
        """Start with a rank and a number of ranks.

        If the other ranks made their objects before a rank died, these are the numbers of that
        time, and calls of `renumber` follow.
        """

    @abstractmethod
    def renumber(self, after: Any, rank: int, size: int) -> None:
        """Change to a new rank and a new number of ranks.

        Args:
            after: The last position before the change.
        """


_Key = tuple[Hashable, int]
_members: WeakValueDictionary[_Key, Member] = WeakValueDictionary()
#: How many objects have joined, by key.
counts: dict[Hashable, int] = defaultdict(int)
# What objects that this rank has yet to make must do to correspond to those of other ranks: the
# arguments of `Member.begin`, and of each `Member.renumber`.
_missed: dict[_Key, tuple[tuple[int, int], list[tuple[Any, int, int]]]] = {}
_before = (0, 1)  # this rank and the number of ranks when the positions were asked for


def join(member: Member, key: Hashable) -> None:
    """Have an object change with the ranks for as long as it lives.

    Args:
        key: The same for the corresponding objects of all ranks; objects of one key correspond
            in the order of their creation.
    """
    with lock:
        number = counts[key]
        counts[key] += 1
        now = world.rank(), world.size()
        first, changes = _missed.pop((key, number), (now, []))
        member.begin(*first)
        for change in changes:
            member.renumber(*change)
        _members[key, number] = member


def positions() -> dict[_Key, Any]:
    """Return the positions of this rank's objects; called with `lock` held, before `renumber`."""
    global _before
    _before = world.rank(), world.size()
    return {key: member.position() for key, member in _members.items()}


def renumber(everywhere: Sequence[Mapping[Any, Any]], rank: int, size: int) -> None:
    """Give all objects new numbers; called with `lock` held.

    Args:
        everywhere: The `positions` of all survivors.
    """
    for key in {key for positions in everywhere for key in positions}:
        after = max(positions[key] for positions in everywhere if key in positions)
        if key in _members:
            _members[key].renumber(after, rank, size)
        elif key[1] >= counts[key[0]]:
            _missed.setdefault(key, (_before, []))[1].append((after, rank, size))
