"""The names of the exchanges of optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from hvdlite.process_sets import ProcessSet, global_process_set

# Ranks make their optimizers in the same order, those of a process set among themselves. The
# numbers outlive the engine, so that exchanges keep their names whoever is the first to use a
# new world.
_numbers: WeakKeyDictionary[ProcessSet, Iterator[int]] = WeakKeyDictionary()


def next_label(kind: str, process_set: ProcessSet | None) -> str:
    """A name that no other exchange of the process set has, and the same on all its ranks."""
    numbers = _numbers.setdefault(process_set or global_process_set, itertools.count())
    return f"{kind} {next(numbers)}"
