"""Seeds of random numbers: equal on all ranks for initial weights, different for the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from hvdlite import world
from hvdlite.arguments import check_count

# Seed a framework's generators with an integer below 2 ** 64. Adapters add theirs.
_frameworks: list[Callable[[int], object]] = []
_EQUAL, _BY_RANK = 0, 1


def seed(n: int) -> AbstractContextManager[None]:
    """Seed the random numbers of Python, numpy and the framework, differently on each rank.

    So augmentation, shuffling within a rank, dropout, and the workers of a DataLoader differ from
    rank to rank, and a run with the same ``n`` on as many ranks draws the same numbers again. As a
    context manager it makes the streams equal on all ranks inside the block, for initial weights;
    after the block they differ by rank, as after the plain call.

    It covers frameworks whose adapter is imported: the generators of PyTorch (also CUDA's), those
    of TensorFlow, and those of Keras, with the seeds of layers that exist already. Not collective.

    Example::

        with hvd.seed(1):
            model = Net()

    Args:
        n: The seed, 0 or more; the same on all ranks.

    Returns:
        The context manager.

    Raises:
        ValueError: ``n`` is not an integer of 0 or more.
        NotInitializedError: hvdlite is not initialized.
    """
    check_count("n", n, 0)
    _seed_all(n, _BY_RANK, world.rank())
    return _equal_inside(n)


@contextmanager
def _equal_inside(n: int) -> Iterator[None]:
    _seed_all(n, _EQUAL)
    try:
        yield
    finally:
        _seed_all(n, _BY_RANK, world.rank())


def seed_too(framework: Callable[[int], object]) -> None:
    """Make `seed` call a function with an integer below 2 ** 64, which differs by rank."""
    if framework not in _frameworks:
        _frameworks.append(framework)


def _seed_all(n: int, *stream: int) -> None:
    # Keys, and not more entropy: SeedSequence([n]) would have the numbers of SeedSequence([n, 0]).
    sequence = np.random.SeedSequence(int(n), spawn_key=stream)
    number = int(sequence.generate_state(1, np.uint64)[0])
    for framework in _frameworks:
        framework(number)
    # Last, because Keras seeds these, too, and with 32 bits.
    random.seed(number)
    np.random.seed(sequence.generate_state(8))
