"""Distribution of samples over ranks and steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlite.base.arguments import check_count
from hvdlite.base.arrays import slice_bounds
from hvdlite.world import parts

_FROM_WORLD: Any = None
# The fields that decide the order of the samples, besides the epoch.
_ORDER = ("samples", "shuffle", "seed")


@dataclass(frozen=True)
class Sharding:
    """Distributes the samples of an epoch over the ranks, every sample exactly once.

    The epoch's permutation is cut into global batches of ``batch_size * size`` samples, and
    each global batch into one contiguous slice per rank; slices differ by one sample at most.
    A remainder of less than half a global batch is shared evenly with the batch before it, so
    that no step is tiny. The permutation depends on ``(seed, epoch)`` alone. Hence
    the samples of a step depend on ``batch_size * size`` and not on the number of ranks (with
    one exception: ``batch_size`` 1 on several ranks adds the remainder to the last
    batch, because two halves could not give each rank a sample). All ranks make the same
    number of steps and no rank's batch is empty, so that no rank waits in a collective for one
    that has finished.

    Args:
        samples: Number of samples in the whole data set.
        batch_size: Samples per rank and step.
        rank: The rank whose samples to return; None: this process's.
        size: The number of ranks; None: that of the world.
        shuffle: Whether to permute the samples in each epoch; False: keep their order.
        seed: Of the permutations; the same on all ranks.
        allow_empty: Whether ranks may have an empty batch if there are fewer samples than
            ranks. For evaluation, where a step has no collective.
        done: Samples of the epoch that all ranks together have already taken. The others are
            distributed as an epoch of their own, to any number of ranks.
        shares: The number of batches of ``batch_size`` in a global batch; 0: one for each rank. It
            is more than that where ranks have died, and the others share the same global batches.

    Raises:
        ValueError: Fewer samples than ranks and not ``allow_empty``, or an argument that is
            out of range.
    """

    samples: int
    batch_size: int
    rank: int = _FROM_WORLD
    size: int = _FROM_WORLD
    shuffle: bool = True
    seed: int = 0
    allow_empty: bool = False
    done: int = 0
    shares: int = 0

    def __post_init__(self) -> None:
        for name, value in zip(("rank", "size"), own_part(self.rank, self.size), strict=True):
            object.__setattr__(self, name, value)
        for name, least in (("samples", 0), ("batch_size", 1), ("seed", 0), ("shares", 0)):
            check_count(name, getattr(self, name), least)
        check_count("done", self.done, 0)
        if self.done > self.samples:
            raise ValueError(f"done={self.done} is more than samples={self.samples}")
        left = self.samples - self.done
        if left >= self.size or self.allow_empty or (self.done and not left):  # an epoch's end
            return
        found = f"{left} samples"
        remedy = ", for evaluation, pass allow_empty=True and weight the metrics by the number of"
        if self.done:
            found = f"after {self.done} of {self.samples} samples the epoch has {left} left, which"
            remedy = " begin with the next epoch and leave out these"
        raise ValueError(
            f"rank {self.rank}: {found} cannot give each of {self.size} ranks one: start at most "
            f"{left} ranks, or{remedy} samples"
        )

    @cached_property
    def global_batch_sizes(self) -> tuple[int, ...]:
        """The number of samples that all ranks together take at each step."""
        ranks = max(self.shares, self.size)  # also where some have died: the batches stay the same
        full_batch = self.batch_size * (self.shares or self.size)
        full, rest = divmod(self.samples - self.done, full_batch)
        if rest == 0:
            return (full_batch,) * full
        if full == 0 or (2 * rest >= full_batch and rest >= ranks):
            return (full_batch,) * full + (rest,)
        tail = full_batch + rest
        halves = ((tail + 1) // 2, tail // 2) if tail >= 2 * ranks else (tail,)
        return (full_batch,) * (full - 1) + halves

    @property
    def steps(self) -> int:
        """The number of steps of the epoch, or of what is left of it; the same on all ranks."""
        return len(self.global_batch_sizes)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The factor of this rank's mean loss at each step.

        A mean over ranks weights all ranks equally, although a remainder may give one rank a
        sample more than another. With the factor ``own samples * size / all samples``, the mean
        over the ranks' means is the mean over all samples of the step. The factor is 1.0 at
        every step that divides evenly.
        """
        return tuple(
            (stop - start) * self.size / total
            for total in self.global_batch_sizes
            for start, stop in [slice_bounds(total, self.size)[self.rank : self.rank + 2]]
        )

    def indices(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return this rank's batches of an epoch, as int64 indices into the data set.

        Args:
            epoch: Number of the epoch, from 0; the same on all ranks.
        """
        return [self.share(batch, self.rank) for batch in self.global_batches(epoch)]

    def global_batches(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return all ranks' batches of an epoch: for each step one array of indices."""
        order = epoch_order(self.samples, epoch, self.shuffle, self.seed)
        bounds = itertools.accumulate(self.global_batch_sizes, initial=self.done)
        return [order[start:stop] for start, stop in itertools.pairwise(bounds)]

    def share(self, batch: npt.NDArray[np.int64], rank: int) -> npt.NDArray[np.int64]:
        """Return the part of a global batch that belongs to a rank."""
        start, stop = slice_bounds(len(batch), self.size)[rank : rank + 2]
        return batch[start:stop]

    def position(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the position in the data after a step, for a checkpoint; see `at`.

        Args:
            epoch: Number of the epoch, from 0.
            step: The steps that all ranks have made with this sharding in that epoch. After the
                last one, the rest of the epoch is empty.

        Returns:
            The epoch, its samples that all ranks together have taken, and the fields that decide
            its order: integers and a bool, the same on all ranks.

        Raises:
            ValueError: The epoch does not have so many steps; or, with virtual ranks, so many have
                not been taken in the whole job.
        """
        if not 0 <= step <= self.steps:
            raise ValueError(f"step={step}: expected 0 to {self.steps}, the steps of the epoch")
        parts.current.check_taken(step)
        done = self.done + sum(self.global_batch_sizes[:step])
        return {"epoch": epoch, "done": done} | {name: getattr(self, name) for name in _ORDER}

    def at(self, state: Mapping[str, Any]) -> Sharding:
        """Return the sharding of the rest of an epoch; its number is ``state["epoch"]``.

        Args:
            state: A position; the batch size and the number of ranks may have been others. If it
                has ``shares``, too, they are those of the result.

        Raises:
            ValueError: The position belongs to another number of samples, another seed or another
                ``shuffle``; or fewer samples are left than there are ranks.
        """
        for name in _ORDER:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}, but the state is one of "
                    f"{name}={state[name]!r}: go on with the same data and the same seed, or begin "
                    "an epoch without the state"
                )
        return replace(self, done=state["done"], shares=state.get("shares", self.shares))

    def taken_over(self, rank: int, size: int) -> Sharding:
        """Return the sharding in which other ranks share the same global batches."""
        if (rank, size) == (self.rank, self.size):
            return self
        return replace(self, rank=rank, size=size, shares=self.shares or self.size)


def epoch_order(samples: int, epoch: int, shuffle: bool, seed: int) -> npt.NDArray[np.int64]:
    """Return the order in which an epoch takes the samples, on any number of ranks."""
    check_count("epoch", epoch, 0)
    order = np.arange(samples, dtype=np.int64)
    if shuffle:
        np.random.default_rng((seed, epoch)).shuffle(order)
    return order


def own_part(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return a rank and a number of ranks as they are given or, if neither is, the world's."""
    if (rank is None) != (size is None):
        raise ValueError(f"rank={rank} and size={size}: give both, or neither to take the world's")
    if rank is None or size is None:
        return parts.current.rank, parts.current.size
    check_count("size", size)
    check_count("rank", rank, 0)
    if rank >= size:
        raise ValueError(f"rank={rank} is not below size={size}")
    return rank, size
