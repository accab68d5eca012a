"""The batches of all virtual ranks that a process plays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlite.errors import ranks_text
from hvdlite.recipe.batches import Batches, take
from hvdlite.recipe.seeding import seed_part
from hvdlite.recipe.sharding import Sharding
from hvdlite.virtual import ranks as virtual_ranks
from hvdlite.virtual.ranks import turns_of
from hvdlite.world import world


class BatchesInTurns(Batches):
    """Batches of one virtual rank after the other, step by step."""

    def __init__(self, data: Any, sharding: Sharding, is_ahead: bool = False) -> None:
        self._turns = turns_of(sharding.size)
        self._yielded = self._before = 0  # batches, and parts that had ended before the first
        self._first_step = 0  # of the iteration
        self._surplus: int | None = None  # batches for which there was no step, with the last one
        super().__init__(data, sharding, is_ahead=is_ahead)  # from here on, ranks may die
        self._follows = False  # the sharding is the same for any number of processes

    def __iter__(self) -> Iterator[Any]:
        turns = self._turns = virtual_ranks.current() or self._turns
        if self.is_ahead and self.trains and turns.done:
            raise RuntimeError(
                f"rank {world.rank()}: a new iteration begins in the middle of step {turns.step}, "
                f"after the batches of virtual {ranks_text(turns.done)}; leave a loop only after a "
                "step (optimizer.stepped), and evaluate under torch.no_grad()"
            )
        epoch, sharding = self._begin_next()
        self._first_step, self._before = turns.step, turns.ended
        self._yielded = 0
        self._surplus = None if self.is_ahead else 1
        for step, batch in enumerate(sharding.global_batches(epoch), start=1):
            share = turns.share
            for rank in share:
                if rank == share[-1]:
                    self._count(epoch, sharding, step, sharding)
                yield self._part(sharding.share(batch, rank), rank)
            while (added := turns.take_added(self)) is not None:
                yield self._part(sharding.share(batch, added), added)
        turns.loaded = None  # those of an evaluation belong to no part
        self._end(epoch)

    def _part(self, indices: npt.NDArray[np.int64], rank: int) -> Any:
        self._turns.load(None if self.is_ahead else rank, self)
        self._yielded += 1
        self._check_skipped()
        seed_part()
        return take(self._data, indices)

    @property
    def _left(self) -> int:
        """The number of batches of the iteration whose parts have not ended."""
        return self._yielded - (self._turns.ended - self._before)

    def _check_skipped(self) -> None:
        """Require that a loop with steps makes one for each batch."""
        turns = self._turns
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
        # A loader that loads in advance asks in vain for as long as it has batches left; these are
        # requests for data, too.
        return _Requests(self)

    def begin(self, rank: int, size: int) -> None:
        """Keep the sharding, which is that of virtual ranks."""

    def renumber(self, after: tuple[int, int], rank: int, size: int) -> None:
        """Stop the training if batches have been taken for parts that others compute now."""
        turns = virtual_ranks.current()
        if turns is None or not (self.is_ahead and self.trains):
            return
        if self._left > 1:
            turns.failure = (
                f"rank {world.rank()}: a rank has died, and the workers of a DataLoader have "
                "loaded batches of this rank's part in advance, which has changed; with virtual "
                "ranks and --elastic, use num_workers=0, or hvd.shard"
            )

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        made = self._taken
        if self.is_ahead and self.trains and self._turns.ended > self._before:
            made = min(made, max(self._turns.step - self._first_step, 0))
        if step is None and made < self._taken:  # the others are prefetched
            return self.sharding.position(self._epoch, made)
        if step is not None and step > made:
            raise ValueError(
                f"step={step}, but {made} steps have been taken in this iteration: with virtual "
                "ranks a loop has several turns for a step; leave step= out, or count the turns "
                "with optimizer.stepped"
            )
        return super().state_dict(step)


class _Requests(Iterator[Any]):
    """The iteration of `BatchesInTurns.requests`."""

    def __init__(self, batches: BatchesInTurns) -> None:
        self._batches = batches
        self._parts = iter(batches)

    def __next__(self) -> Any:
        try:
            return next(self._parts)
        except StopIteration:
            batches = self._batches
            if batches.trains and batches._left > 0:  # returned next, as it was loaded in advance
                batches._turns.announce(batches)
            raise
