"""Seeds of random numbers: equal on all ranks for initial weights, different for the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from hvdlite.base.arguments import check_count
from hvdlite.world import parts, world

# Functions that seed a framework's generators with an integer below 2 ** 64, and whether they are
# called for each part of a step, too. Adapters add theirs.
_frameworks: dict[Callable[[int], object], bool] = {}
_EQUAL, _BY_RANK, _BY_PART = 0, 1, 2
#: The number of the last call of `seed`; 0 before it.
last = 0


def seed(n: int) -> AbstractContextManager[None]:
    """Seed the random numbers of Python, numpy and the framework, differently on each rank.

    So augmentation, shuffling within a rank, dropout, and the workers of a DataLoader differ from
    rank to rank, and a run with the same ``n`` on as many ranks draws the same numbers again. As a
    context manager it makes the streams equal on all ranks inside the block, for initial weights;
    after the block they differ by rank, as after the plain call.

    It covers frameworks whose adapter is imported: the generators of PyTorch (also CUDA's), those
    of TensorFlow, and those of Keras, with the seeds of layers that exist already. Not collective.

    With virtual ranks (`init`), numbers differ by virtual rank and step instead, and each part of a
    step begins with its own; so they do not depend on the number of processes.

    Example::

        with hvd.seed(1):
            model = Net()

    Args:
        n: The seed, 0 or more; the same on all ranks.

    Raises:
        ValueError: ``n`` is not an integer of 0 or more.
        NotInitializedError: hvdlite is not initialized.
    """
    global last
    check_count("n", n, 0)
    last = n
    _seed_differently(n)
    return _equal_inside(n)


def own_number() -> int:
    """Return what frameworks are seeded with on this rank, after the last call of `seed`."""
    return _number(np.random.SeedSequence(last, spawn_key=(_BY_RANK, world.rank())))


@contextmanager
def _equal_inside(n: int) -> Iterator[None]:
    _seed_all(n, _EQUAL)
    try:
        yield
    finally:
        _seed_differently(n)


def _seed_differently(n: int) -> None:
    rank = world.rank()  # raises where there is none
    if parts.current.place is None:
        _seed_all(n, _BY_RANK, rank)
    else:
        seed_part(all_frameworks=True)


def seed_part(all_frameworks: bool = False) -> int:
    """Seed the random numbers of the virtual rank whose turn it is, for its part of the step.

    It does nothing where there are no virtual ranks.

    Args:
        all_frameworks: Whether to seed those for which it takes long, too.

    Returns:
        The seed, for frameworks that are not seeded by this; 0: there are no virtual ranks.
    """
    place = parts.current.place
    if place is None:
        return 0
    return _seed_all(last, _BY_PART, *place, is_part=not all_frameworks)


def seed_too(framework: Callable[[int], object], parts: bool = True) -> None:
    """Add a function that `seed` calls, and with ``parts`` also `seed_part`; see `_frameworks`."""
    _frameworks[framework] = parts


def _seed_all(n: int, *stream: int, is_part: bool = False) -> int:
    # Keys, and not more entropy: SeedSequence([n]) would have the numbers of SeedSequence([n, 0]).
    sequence = np.random.SeedSequence(int(n), spawn_key=stream)
    number = _number(sequence)
    for framework, seeds_parts in _frameworks.items():
        if seeds_parts or not is_part:
            framework(number)
    # Last, because Keras seeds these, too, and with 32 bits.
    random.seed(number)
    np.random.seed(sequence.generate_state(8))
    return number


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])
