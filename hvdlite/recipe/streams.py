"""Data of unknown length: dealt to the ranks by turns, and steps that all ranks make together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from hvdlite import collectives
from hvdlite.base.arguments import check_count
from hvdlite.base.reduction import Min
from hvdlite.engine import Handle, runtime
from hvdlite.errors import HorovodInternalError
from hvdlite.recipe.sharding import own_part
from hvdlite.world import parts, world

_Item = TypeVar("_Item")
# What ranks tell each other of their next items; a rank that has failed tells its id instead. No
# number depends on how many ranks there are, of which one may die meanwhile.
_END, _MORE = 2**62, 2**62 + 1


class Stream:
    """One rank's batches of an iterable of unknown length; made by `shard`.

    Every rank reads all items and keeps its own, so all must read the same ones in the same order.
    Sample ``i`` belongs to rank ``i % size``, and a batch has ``batch_size`` samples. At the end
    the last batch is smaller or, on some ranks, has one sample more: every sample comes once, and
    all ranks make the same number of steps, of which they need not tell each other.

    Each iteration reads the iterable from its beginning, as far as that can be done again, for the
    ranks that there are then. What belongs to one that dies meanwhile is lost.

    Args:
        batch_size, rank, size: As for `shard`.
        allow_empty: Whether ranks may have no batch if there are fewer samples than ranks.
    """

    def __init__(
        self,
        data: Iterable[Any],
        batch_size: int,
        rank: int | None = None,
        size: int | None = None,
        allow_empty: bool = False,
    ) -> None:
        check_count("batch_size", batch_size)
        if rank is None and size is None:
            parts.current.refuse(
                f"data of unknown length (a {type(data).__name__})", "give them a length and items"
            )
        self.data, self.batch_size, self.allow_empty = data, batch_size, allow_empty
        self._given = rank, size
        self.rank, self.size = own_part(rank, size)

    def _follow(self) -> None:
        """Take the numbers of now: ranks may have died since, or have come in."""
        if world.is_initialized():  # not in a worker that was not forked
            self.rank, self.size = own_part(*self._given)

    def __getstate__(self) -> dict[str, Any]:
        self._follow()
        return self.__dict__

    def __iter__(self) -> Iterator[list[Any]]:
        return self.part(0, 1)

    def part(self, number: int, parts: int) -> Iterator[list[Any]]:
        """Return every ``parts``-th batch, from batch ``number`` on, for one of several workers."""
        self._follow()
        rank, size = self.rank, self.size
        whole = self.batch_size * size
        batch: list[Any] = []
        step, samples = 0, 0
        for samples, item in enumerate(self.data, start=1):
            if (samples - 1) % size == rank:
                batch.append(item)
            # Now every rank has a sample of the next batch, so that this one is not the last.
            if samples == (step + 1) * whole + size:
                if step % parts == number:
                    yield batch[:-1]
                step, batch = step + 1, batch[-1:]
        if samples < size and not self.allow_empty:
            raise ValueError(
                f"{samples} samples cannot give each of {size} ranks one: start at most "
                f"{samples} ranks or, for evaluation, pass allow_empty=True; a generator can be "
                "read only once"
            )
        if batch and step % parts == number:
            yield batch


def lockstep(iterable: Iterable[_Item]) -> Iterator[_Item]:
    """Yield each rank's own items until the first rank has no more: the same number on all ranks.

    For data that are split already, such as files of different lengths: without it, ranks with more
    items would wait for ever in an exchange with one that has finished. Their rest, and one item
    that has been read ahead, are dropped; `join` is for those who want it. Collective: all ranks
    iterate. The ranks tell each other of the next item while they work on the current one.

    Example::

        for images, labels in hvd.lockstep(loader):
            ...

    Args:
        iterable: A DataLoader, a ``tf.data.Dataset``, a generator, or anything else.

    Raises:
        Exception: This rank's iterable has raised it.
        HorovodInternalError: Another rank's iterable has raised an exception.
        ValueError: There are virtual ranks.
    """
    parts.current.refuse("lockstep", "take the batches of hvd.shard, which has as many for all")
    if world.size() == 1:
        yield from iterable
        return
    name = runtime.engine().unnamed("lockstep")
    items = iter(iterable)
    following = _announce(items, name)
    while True:
        item, failure, handle = following
        state = int(handle.wait()[0])
        if failure is not None:
            raise failure
        if state == _END:
            return
        if state < _END:
            raise HorovodInternalError(
                f"rank {state} has no next item: its data raised an exception, which it shows"
            )
        following = _announce(items, name)
        yield item


def _announce(items: Iterator[Any], name: str) -> tuple[Any, Exception | None, Handle]:
    """Read the next item and begin to tell all ranks; return both, and the exception if any.

    The least number of all ranks counts: that of a rank that has failed, then `_END`.
    """
    item, failure, state = None, None, _MORE
    try:
        item = next(items)
    except StopIteration:
        state = _END
    except Exception as error:
        failure, state = error, world.current().id
    return item, failure, collectives.allreduce_async(np.array([state]), name=name, op=Min)
