"""One rank's batches of a data set in arrays or in a sequence."""

from __future__ import annotations

import dataclasses
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvdlite.observe import status
from hvdlite.recipe.sharding import Sharding
from hvdlite.recipe.streams import Stream
from hvdlite.world import membership, parts, world
from hvdlite.world.membership import Member


class Batches(Member):
    """One rank's batches of a data set; made by `shard`.

    ``len()`` is the number of steps of the next iteration. Each iteration is one epoch, or what is
    left of one after `load_state_dict`. After its last batch, the next iteration is the next epoch;
    an abandoned iteration (for example to look at the first batch, on one rank) changes nothing.
    To end an epoch early, call `set_epoch` on all ranks. Prefetched batches count as taken.

    When a rank dies and the others go on, they share its part of the global batches from the first
    one on that none of them has taken: the steps and the global batches stay the same.

    With virtual ranks, an iteration yields the batches of all those that this process plays, step
    by step (`hvdlite.virtual.ranks`).

    Args:
        data: As for `shard`.
        sharding: Which samples are this rank's.
        follows: Whether the sharding is that of the world.
        is_ahead: Whether batches may be taken before those that have been taken are used, as the
            workers of a DataLoader do.

    Attributes:
        sharding: That of the next iteration, or of the one in progress.
        trains: Whether the batches are used for training, if that is known.
        content: What tells whether all ranks have the same data, as far as it is known.
    """

    def __init__(
        self, data: Any, sharding: Sharding, follows: bool = True, is_ahead: bool = False
    ) -> None:
        self.is_ahead = is_ahead
        self.trains = True
        self.sharding = sharding
        self._data = data
        self._epoch = 0  # of the sharding
        self._taken = 0  # batches of that epoch that the last iteration has yielded
        self._asked = 0  # the last one of those that were asked for by number
        self._is_over = False  # whether these are all, so that the next iteration is another epoch
        self._is_at_end = False  # whether a loop over that epoch has yet to ask for another batch
        self._changes: list[tuple[tuple[int, int], int, int]] = []  # see `renumber`, oldest first
        self._follows = follows
        self._fields = sharding.samples, sharding.batch_size, sharding.shuffle, sharding.seed
        self.content = [checksum(part) for _, part in _parts(data, "data")]
        self._noted: object = ()  # the division that was noted last
        if follows:
            membership.join(self, self._fields)

    def __len__(self) -> int:
        return self.upcoming.steps

    def __iter__(self) -> Iterator[Any]:
        epoch, sharding = self._begin_next()
        for step, batch in enumerate(sharding.global_batches(epoch), start=1):
            with membership.lock:
                numbered = self._numbered(sharding, (epoch, step))
                # Before the last batch is yielded: a loop that counts steps asks for no other one.
                self._count(epoch, sharding, step, numbered)
                self._note(epoch)
            sharding = numbered
            yield take(self._data, sharding.share(batch, sharding.rank))
        self._end(epoch)

    def requests(self) -> Iterator[Any]:
        """Return an iteration for a loader that asks for another batch whenever it returns one."""
        return iter(self)

    def _count(self, epoch: int, sharding: Sharding, step: int, numbered: Sharding) -> None:
        """Count a step as taken, unless another iteration or `set_epoch` has moved the epoch."""
        if self._epoch == epoch and self.sharding is sharding and not self._is_over:
            self.sharding = numbered
            self._taken = step
            self._is_over = self._is_at_end = step == numbered.steps

    def _note(self, epoch: int) -> None:
        """Note the division of the data, which ranks compare when they train on it."""
        if self._follows and self.trains:
            # A thread that reads ahead may have begun the next epoch, on some ranks.
            is_main = threading.current_thread() is threading.main_thread()
            self._noted = *self._fields, *self.content, epoch if is_main else None
            membership.division = self._noted

    def _end(self, epoch: int) -> None:
        if self._epoch == epoch:
            self._is_over = self._is_over or not self.sharding.steps  # the rest of it was empty
            self._is_at_end = False

    def position(self) -> tuple[int, int]:
        taken = 0 if self._is_over else self._taken
        return self._epoch + self._is_over, max(taken, self._asked)

    def ask(self, step: int) -> tuple[int, Sharding]:
        """Take a step of the next iteration by its number, from 1; return epoch and sharding."""
        with membership.lock:
            self._asked = max(self._asked, step)
            epoch, _ = self.position()
            self._note(epoch)
            return epoch, self._numbered(self.upcoming, (epoch, step))

    def begin(self, rank: int, size: int) -> None:
        self.sharding = dataclasses.replace(self.sharding, rank=rank, size=size)

    def renumber(self, after: tuple[int, int], rank: int, size: int) -> None:
        self._changes.append((after, rank, size))

    def _numbered(self, sharding: Sharding, at: tuple[int, int]) -> Sharding:
        """Return the sharding with the rank and the number of ranks of an epoch's step."""
        for after, rank, size in reversed(self._changes):
            if at > after:
                return sharding.taken_over(rank, size)
        return sharding

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return all batches of this rank in an epoch (from 0), where no virtual ranks are."""
        parts.current.refuse("epoch()", "iterate over the batches, after set_epoch(n)")
        whole = dataclasses.replace(self.sharding, done=0)
        return (take(self._data, indices) for indices in whole.indices(epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration: the same on all ranks.

        The epoch at which training goes on after `load_state_dict` begins in its middle; any other
        at its start.
        """
        if epoch != self.position()[0]:
            self._begin(epoch, dataclasses.replace(self.sharding, done=0))

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint: the same on all ranks.

        Args:
            step: The steps that the iteration in progress, or the last one, has made; None: as many
                as it has yielded batches. Give it where batches are prefetched, for example by the
                workers of a DataLoader. With virtual ranks, where a step takes several batches, it
                can always be left out, except for a ``tf.data.Dataset``.

        Returns:
            The epoch, the samples of it that all ranks have taken, and what its order depends on;
            integers and a bool. Within a loop over the batches it is a position in that loop's
            epoch, also after the last batch: what is left of the epoch is empty then.

        Raises:
            ValueError: ``step`` is not one of the iteration's; with virtual ranks also if so many
                have not been taken yet.

        Example::

            hvd.checkpoint(path).save({"weights": weights, "data": batches.state_dict()})
        """
        if step is None and self._is_over and not self._is_at_end:
            return self.upcoming.position(self._epoch + 1, 0)
        if step is not None and step < 1:
            raise ValueError(
                f"step={step}: expected at least 1; leave it out before the first step"
            )
        return self.sharding.position(self._epoch, self._taken if step is None else step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that `state_dict` has returned, on any number of ranks.

        The next iteration is the rest of that epoch: every sample that no rank had taken, once.
        The batch size may differ, too. After a death, the ranks that are left share it from its
        first step on.

        Raises:
            ValueError: As `Sharding.at`.
        """
        with membership.lock:
            sharding = self.sharding
            if self._follows:
                sharding = sharding.taken_over(world.rank(), world.size())
                self._changes.clear()
            self._begin(state["epoch"], sharding.at(state))

    @property
    def upcoming(self) -> Sharding:
        """The sharding of the next iteration."""
        return dataclasses.replace(self.sharding, done=0) if self._is_over else self.sharding

    def _begin(self, epoch: int, sharding: Sharding) -> None:
        self._epoch, self.sharding, self._taken, self._asked = epoch, sharding, 0, 0
        self._is_over = self._is_at_end = False
        self._steps_before = status.counts.total()  # of this process

    def _begin_next(self) -> tuple[int, Sharding]:
        is_left = self._taken and not self._is_over and membership.division is self._noted
        if is_left and status.counts.total() > self._steps_before and world.rank() == 0:
            warnings.warn(
                "an epoch of the data was left after some steps, and the next iteration takes the "
                "same batches again: set_epoch(epoch + 1) on all ranks goes on to other ones",
                stacklevel=3,
            )
        self._begin(self.position()[0], self.upcoming)
        return self._epoch, self.sharding


def shard(
    data: Any,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
    allow_empty: bool = False,
) -> Any:
    """Distribute a data set over the ranks: each sample once per epoch, remainder included.

    Args:
        data: An array (first axis: samples), a tuple or dict of arrays of equal length, or a
            sequence of samples (a list, a map-style data set). Batches of arrays are arrays,
            batches of a sequence lists, batches of a tuple or dict the same of their parts. An
            iterable without a length, such as a generator, is dealt sample by sample (see
            `Stream`): all ranks read the same samples in the same order.
        batch_size: Samples per rank and step.
        shuffle: Whether to permute the samples in each epoch; False for evaluation, and for
            an iterable without a length.
        seed: Of the permutations; the same on all ranks.
        rank: The rank whose batches to return; None: this process's.
        size: The number of ranks; None: that of the world.
        allow_empty: Whether ranks may have an empty batch if there are fewer samples than
            ranks (for evaluation).

    Returns:
        The rank's batches, to be iterated once per epoch; see `Batches` and `Stream`.

    Raises:
        ValueError: Lengths disagree, a number is out of range (see `Sharding`), or an iterable
            without a length is to be shuffled.
        TypeError: ``data`` has no length or no items.

    Example:
        >>> x, y = np.arange(10.0), np.arange(10)
        >>> batches = shard((x, y), batch_size=2, shuffle=False, rank=1, size=2)
        >>> [labels.tolist() for _, labels in batches]
        [[2, 3], [6, 7], [9]]
    """
    if hasattr(data, "__iter__") and not hasattr(data, "__len__") and not hasattr(data, "shape"):
        if shuffle:
            raise ValueError(
                f"data is a {type(data).__name__} of unknown length, which cannot be permuted: "
                "pass shuffle=False, and shuffle in it, with the same seed on all ranks"
            )
        return Stream(data, batch_size, rank, size, allow_empty)
    lengths = {name: len(part) for name, part in _parts(data, "data")}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"len({name}) = {length}" for name, length in lengths.items())
        raise ValueError(f"{found}: all parts of the data need the same number of samples")
    if not lengths:
        raise ValueError(f"data is an empty {type(data).__name__}: expected at least one array")
    samples = next(iter(lengths.values()))
    sharding = Sharding(samples, batch_size, rank, size, shuffle, seed, allow_empty)  # type: ignore[arg-type]
    return load(data, sharding) if rank is None else Batches(data, sharding, follows=False)


def load(data: Any, sharding: Sharding, is_ahead: bool = False) -> Batches:
    """Return the batches of this process's parts; arguments as for `Batches`."""
    kind = parts.current.batches() or Batches
    return cast(Batches, kind(data, sharding, is_ahead=is_ahead))


def _parts(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of every array or sequence in the data, and itself."""
    if isinstance(data, dict):
        for key, part in data.items():
            yield from _parts(part, f"{name}[{key!r}]")
    elif isinstance(data, tuple):
        for index, part in enumerate(data):
            yield from _parts(part, f"{name}[{index}]")
    else:
        if isinstance(data, (str, bytes)) or not hasattr(data, "__getitem__"):
            raise TypeError(f"{name} is a {type(data).__name__}: expected an array or a sequence")
        try:
            len(data)
        except TypeError as error:
            raise TypeError(f"{name} is a {type(data).__name__} without a length") from error
        yield name, data


def checksum(part: Any) -> int:
    """Return that of some samples of an array, or of some indices of a subset; else 0."""
    kept = part if isinstance(part, np.ndarray) else getattr(part, "indices", None)
    if not isinstance(kept, (np.ndarray, list)):
        return 0
    some = np.asarray(kept[:: len(kept) // 16 + 1])
    return 0 if some.dtype.hasobject else zlib.crc32(some.tobytes())


def take(data: Any, indices: npt.NDArray[np.int64]) -> Any:
    """Return some samples of data, in the structure of the data."""
    if isinstance(data, dict):
        return {key: take(part, indices) for key, part in data.items()}
    if isinstance(data, tuple):
        return tuple(take(part, indices) for part in data)
    if hasattr(data, "iloc"):  # a data frame's brackets would take columns or labels
        return data.iloc[indices]
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        if not hasattr(data, "chunks"):
            return data[indices]
        order = np.argsort(indices)  # in a file (h5py), whose rows are read in increasing order
        return data[indices[order]][np.argsort(order)]
    return [data[index] for index in indices.tolist()]
