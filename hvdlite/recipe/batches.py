"""One rank's batches of a data set in arrays or in a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlite.recipe.sharding import Sharding


class Batches:
    """One rank's batches of a data set; made by `shard`.

    ``len()`` is the number of steps per epoch. Each iteration is one epoch. After its last
    batch, the next iteration is the next epoch; an abandoned iteration (for example to look at
    the first batch, on one rank) changes nothing. To end an epoch early, call `set_epoch` on all
    ranks. Prefetched batches count as taken.

    Args:
        data: As for `shard`.
        sharding: Which samples are this rank's.
    """

    def __init__(self, data: Any, sharding: Sharding) -> None:
        self.sharding = sharding
        self._data = data
        self._next_epoch = 0

    def __len__(self) -> int:
        return self.sharding.steps

    def __iter__(self) -> Iterator[Any]:
        epoch = self._next_epoch
        for step, batch in enumerate(self.epoch(epoch), start=1):
            # Count before the last batch is yielded, since a loop that counts steps never asks for
            # another one; but not if another iteration or `set_epoch` has moved the epoch.
            if step == len(self) and self._next_epoch == epoch:
                self._next_epoch += 1
            yield batch

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return this rank's batches of the given epoch (from 0)."""
        return (_take(self._data, indices) for indices in self.sharding.indices(epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration: the same on all ranks."""
        self._next_epoch = epoch


def shard(
    data: Any,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
    allow_empty: bool = False,
) -> Batches:
    """Distribute a data set over the ranks: each sample once per epoch, remainder included.

    Args:
        data: An array (first axis: samples), a tuple or dict of arrays of equal length, or a
            sequence of samples (a list, a map-style data set). Batches of arrays are arrays,
            batches of a sequence lists, batches of a tuple or dict the same of their parts.
        batch_size: Samples per rank and step.
        shuffle: Whether to permute the samples anew in each epoch; False for evaluation.
        seed: Of the permutations; the same on all ranks.
        rank: The rank whose batches to return; None: this process's.
        size: The number of ranks; None: that of the world.
        allow_empty: Whether ranks may have an empty batch if there are fewer samples than
            ranks (for evaluation).

    Returns:
        The rank's batches, to be iterated once per epoch; see `Batches`.

    Raises:
        ValueError: Lengths disagree, or a number is out of range (see `Sharding`).
        TypeError: ``data`` has no length or no items.

    Example:
        >>> x, y = np.arange(10.0), np.arange(10)
        >>> batches = shard((x, y), batch_size=2, shuffle=False, rank=1, size=2)
        >>> [labels.tolist() for _, labels in batches]
        [[2, 3], [6, 7], [9]]
    """
    lengths = dict(_lengths(data, "data"))
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"len({name}) = {length}" for name, length in lengths.items())
        raise ValueError(f"{found}: all parts of the data need the same number of samples")
    if not lengths:
        raise ValueError(f"data is an empty {type(data).__name__}: expected at least one array")
    samples = next(iter(lengths.values()))
    sharding = Sharding(samples, batch_size, rank, size, shuffle, seed, allow_empty)  # type: ignore[arg-type]
    return Batches(data, sharding)


def _lengths(data: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the length of every array or sequence in the data."""
    if isinstance(data, dict):
        for key, part in data.items():
            yield from _lengths(part, f"{name}[{key!r}]")
    elif isinstance(data, tuple):
        for index, part in enumerate(data):
            yield from _lengths(part, f"{name}[{index}]")
    else:
        if isinstance(data, (str, bytes)) or not hasattr(data, "__getitem__"):
            raise TypeError(f"{name} is a {type(data).__name__}: expected an array or a sequence")
        try:
            yield name, len(data)
        except TypeError as error:
            raise TypeError(f"{name} is a {type(data).__name__} without a length") from error


def _take(data: Any, indices: npt.NDArray[np.int64]) -> Any:
    if isinstance(data, dict):
        return {key: _take(part, indices) for key, part in data.items()}
    if isinstance(data, tuple):
        return tuple(_take(part, indices) for part in data)
    if hasattr(data, "iloc"):  # a data frame's brackets would take columns or labels
        return data.iloc[indices]
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return data[indices]
    return [data[index] for index in indices.tolist()]
