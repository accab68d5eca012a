"""One rank's batches of a data set in arrays or in a sequence."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlite import membership, virtual_ranks, world
from hvdlite.engine.agreement import ranks_text
from hvdlite.membership import Member
from hvdlite.recipe.seeding import seed_part
from hvdlite.recipe.sharding import Sharding
from hvdlite.recipe.streams import Stream
from hvdlite.virtual_ranks import Turns


class Batches(Member):
    """One rank's batches of a data set; made by `shard`.

    ``len()`` is the number of steps of the next iteration. Each iteration is one epoch, or what is
    left of one after `load_state_dict`. After its last batch, the next iteration is the next epoch;
    an abandoned iteration (for example to look at the first batch, on one rank) changes nothing.
    To end an epoch early, call `set_epoch` on all ranks. Prefetched batches count as taken.

    When a rank dies and the others go on, they share its part of the global batches from the first
    one on that none of them has taken: the steps and the global batches stay the same.

    With virtual ranks, an iteration yields the batches of all those that this process plays, step
    by step (`hvdlite.virtual_ranks`).

    Args:
        data: As for `shard`.
        sharding: Which samples are this rank's.
        follows: Whether the sharding is that of the world.
        is_ahead: Whether batches may be taken before those that have been taken are used, as the
            workers of a DataLoader do.

    Attributes:
        sharding: That of the next iteration, or of the one in progress.
        is_ahead: As given.
        trains: Whether the batches are used for training, if that is known.
    """

    def __init__(
        self, data: Any, sharding: Sharding, follows: bool = True, is_ahead: bool = False
    ) -> None:
        self.is_ahead = is_ahead
        self.trains = True
        self.sharding = sharding
        self._data = data
        self._next_epoch = 0
        self._taken = 0  # batches of the next epoch that the last iteration has yielded
        self._is_over = False  # whether the sharding is that of an epoch that has ended
        self._is_at_end = False  # whether a loop over that epoch has yet to ask for another batch
        self._changes: list[tuple[tuple[int, int], int, int]] = []  # see `renumber`, oldest first
        self._turns = virtual_ranks.current if follows else None
        self._yielded = self._before = 0  # batches, and parts that had ended before the first
        self._first_step = 0  # of the iteration
        self._surplus: int | None = None  # batches for which there was no step, with the last one
        self._follows = follows
        if follows:
            fields = sharding.samples, sharding.batch_size, sharding.shuffle, sharding.seed
            membership.join(self, fields)

    def __len__(self) -> int:
        return self.upcoming.steps

    def __iter__(self) -> Iterator[Any]:
        turns = self._turns if virtual_ranks.current is None else virtual_ranks.current
        if self._turns is not None and turns is not None:
            return self._iterate_in_turns(turns)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        self._begin(self._next_epoch, self.upcoming)
        epoch, sharding = self._next_epoch, self.sharding
        indices = sharding.indices(epoch)
        for step in range(1, sharding.steps + 1):
            with membership.lock:
                numbered = self._numbered(sharding, (epoch, step))
                # Count before the last batch is yielded, since a loop that counts steps never asks
                # for another one; but not if another iteration or `set_epoch` has moved the epoch.
                if self._next_epoch == epoch and self.sharding is sharding:
                    self.sharding = numbered
                    self._count(epoch, step)
            if numbered is not sharding:
                sharding, indices = numbered, numbered.indices(epoch)
            yield take(self._data, indices[step - 1])
        self._end(epoch)

    def _iterate_in_turns(self, turns: Turns) -> Iterator[Any]:
        """Yield the batches of all virtual ranks that this process plays."""
        if self.is_ahead and self.trains and turns.done:
            raise RuntimeError(
                f"rank {world.rank()}: a new iteration begins in the middle of step {turns.step}, "
                f"after the batches of virtual {ranks_text(turns.done)}; leave a loop only after a "
                "step (optimizer.stepped), and evaluate under torch.no_grad()"
            )
        self._begin(self._next_epoch, self.upcoming)
        epoch, sharding = self._next_epoch, self.sharding
        self._turns, self._first_step, self._before = turns, turns.step, turns.ended
        self._yielded = 0
        self._surplus = None if self.is_ahead else 1
        for step, batch in enumerate(sharding.global_batches(epoch), start=1):
            share = turns.share
            for rank in share:
                if rank == share[-1] and (self._next_epoch, self.sharding) == (epoch, sharding):
                    self._count(epoch, step)
                yield self._part(turns, sharding.share(batch, rank), rank)
            while (added := turns.take_added(self)) is not None:
                yield self._part(turns, sharding.share(batch, added), added)
        turns.loaded = None  # those of an evaluation belong to no part
        self._end(epoch)

    def _part(self, turns: Turns, indices: npt.NDArray[np.int64], rank: int) -> Any:
        """Return the batch of a virtual rank."""
        turns.load(None if self.is_ahead else rank, self)
        self._yielded += 1
        self._check_skipped(turns)
        seed_part()
        return take(self._data, indices)

    @property
    def _left(self) -> int:
        """The number of batches of the iteration whose parts have not ended."""
        turns = self._turns
        return 0 if turns is None else self._yielded - (turns.ended - self._before)

    def _check_skipped(self, turns: Turns) -> None:
        """Require that a loop with steps makes one for each batch."""
        if turns.ended == self._before or turns.thread != threading.get_ident():
            return  # no steps, as in an evaluation; or a thread takes batches in advance
        if self._surplus is None:
            self._surplus = self._left
        if self._left > self._surplus:
            raise RuntimeError(
                f"rank {world.rank()}: a loop over batches has taken a batch without a step; with "
                "virtual ranks each batch is the part of another one, so call optimizer.step() "
                "for each, with batch_size=0 for one to be left out; to accumulate gradients, "
                "raise batch_size instead"
            )

    def requests(self) -> Iterator[Any]:
        """Return an iteration for a loader that asks for another batch whenever it returns one.

        If it loads in advance, it asks in vain for as long as it has batches left. These are
        requests for data, too.
        """
        return iter(self) if self._turns is None else _Requests(self)

    def announce_rest(self) -> None:
        """Announce that a loader returns a batch that it has loaded in advance, if it has one."""
        if self._turns is not None and self.trains and self._left > 0:
            self._turns.announce(self)

    def _count(self, epoch: int, step: int) -> None:
        """Count a step of the iteration in progress as taken."""
        self._taken = step
        if step == self.sharding.steps:
            self._next_epoch, self._taken, self._is_over = epoch + 1, 0, True
            self._is_at_end = True

    def _end(self, epoch: int) -> None:
        """Note that a loop over an epoch has come to its end."""
        if self._next_epoch == epoch and not self.sharding.steps:  # the rest of it was empty
            self._count(epoch, 0)
        if self._next_epoch == epoch + 1:
            self._is_at_end = False

    def position(self) -> tuple[int, int]:
        """Return the epoch and its step that this rank has taken last."""
        return self._next_epoch, self._taken

    def begin(self, rank: int, size: int) -> None:
        if self._turns is None:
            self.sharding = dataclasses.replace(self.sharding, rank=rank, size=size)

    def renumber(self, after: tuple[int, int], rank: int, size: int) -> None:
        """Take on a new rank and a new number of ranks after an epoch's step."""
        if self._turns is not None:
            self._check_ahead()
            return
        self._changes.append((after, rank, size))

    def _check_ahead(self) -> None:
        """Stop the training if batches have been taken for parts that others compute now."""
        turns = virtual_ranks.current
        if turns is None or not (self.is_ahead and self.trains):
            return
        if self._yielded - (turns.ended - self._before) > 1:
            turns.failure = (
                f"rank {world.rank()}: a rank has died, and the workers of a DataLoader have "
                "loaded batches of this rank's part in advance, which has changed; with virtual "
                "ranks and --elastic, use num_workers=0, or hvd.shard"
            )

    def _numbered(self, sharding: Sharding, at: tuple[int, int]) -> Sharding:
        """Return the sharding with the rank and the number of ranks of an epoch's step."""
        for after, rank, size in reversed(self._changes):
            if at > after:
                return sharding.taken_over(rank, size)
        return sharding

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return this rank's batches of the given epoch (from 0), all of them.

        Raises:
            ValueError: There are virtual ranks.
        """
        virtual_ranks.refuse("epoch()", "iterate over the batches, after set_epoch(n)")
        whole = dataclasses.replace(self.sharding, done=0)
        return (take(self._data, indices) for indices in whole.indices(epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration: the same on all ranks.

        The epoch at which training goes on after `load_state_dict` begins in its middle; any other
        at its start.
        """
        if epoch != self._next_epoch:
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
        counted = self.sharding.steps if self._is_over else self._taken
        made = counted if self._turns is None else self._count_made(self._turns, counted)
        if step is None and made < counted:  # the others are prefetched
            return self.sharding.position(self._next_epoch - self._is_over, made)
        if step is None and self._is_at_end:
            return self.sharding.position(self._next_epoch - 1, self.sharding.steps)
        if step is None:
            return self.upcoming.position(self._next_epoch, self._taken)
        if step < 1:
            raise ValueError(
                f"step={step}: expected at least 1; leave it out before the first step"
            )
        if self._turns is not None and step > made:
            raise ValueError(
                f"step={step}, but {made} steps have been taken in this iteration: with virtual "
                "ranks a loop has several turns for a step; leave step= out, or count the turns "
                "with optimizer.stepped"
            )
        return self.sharding.position(self._next_epoch - self._is_over, step)

    def _count_made(self, turns: Turns, counted: int) -> int:
        """Return the steps that have been taken, of which a loader may have taken more batches."""
        if self.is_ahead and self.trains and turns.ended > self._before:
            return min(counted, max(turns.step - self._first_step, 0))
        return counted

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
            if self._follows and self._turns is None:
                sharding = sharding.taken_over(world.rank(), world.size())
                self._changes.clear()
            self._begin(state["epoch"], sharding.at(state))

    @property
    def upcoming(self) -> Sharding:
        """The sharding of the next iteration."""
        return dataclasses.replace(self.sharding, done=0) if self._is_over else self.sharding

    def _begin(self, epoch: int, sharding: Sharding) -> None:
        self.sharding = sharding
        self._next_epoch, self._taken, self._is_over = epoch, 0, False
        self._is_at_end = False


class _Requests(Iterator[Any]):
    """The iteration of `Batches.requests`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._parts = iter(batches)

    def __next__(self) -> Any:
        try:
            return next(self._parts)
        except StopIteration:
            self._batches.announce_rest()
            raise


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
        shuffle: Whether to permute the samples anew in each epoch; False for evaluation, and for
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
    lengths = dict(_lengths(data, "data"))
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"len({name}) = {length}" for name, length in lengths.items())
        raise ValueError(f"{found}: all parts of the data need the same number of samples")
    if not lengths:
        raise ValueError(f"data is an empty {type(data).__name__}: expected at least one array")
    samples = next(iter(lengths.values()))
    sharding = Sharding(samples, batch_size, rank, size, shuffle, seed, allow_empty)  # type: ignore[arg-type]
    return Batches(data, sharding, follows=rank is None)


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


def take(data: Any, indices: npt.NDArray[np.int64]) -> Any:
    """Return some samples of data, in the structure of the data."""
    if isinstance(data, dict):
        return {key: take(part, indices) for key, part in data.items()}
    if isinstance(data, tuple):
        return tuple(take(part, indices) for part in data)
    if hasattr(data, "iloc"):  # a data frame's brackets would take columns or labels
        return data.iloc[indices]
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return data[indices]
    return [data[index] for index in indices.tolist()]
