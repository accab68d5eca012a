"""The samples of an epoch, dealt again to another number of ranks in its middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from hvdlite import world
from hvdlite.recipe import Sharding


class ElasticSampler(Sampler[int]):
    """Deals the samples of an epoch that have not been processed yet to the ranks.

    Every sample comes once per epoch over all ranks, also when the ranks become more or fewer
    in its middle: what a rank has recorded as processed is not dealt again. The samples of a
    step are the next ``batch_size * size`` of the epoch's order, which depends on
    ``(seed, epoch)`` alone.

    A DataLoader puts its own batches together, so every rank must get equally many samples to
    make equally many steps. Where they do not divide evenly, the first of those dealt are
    dealt again, to at most ``size - 1`` ranks, as Horovod does. `ShardSampler`, which makes the
    batches itself, repeats none, but knows no epoch that begins in its middle.

    Give it to `TorchState` as one of the keywords, and record each batch::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

        for batch, (images, labels) in enumerate(loader):
            ...
            state.sampler.record_batch(batch, 32)
            state.commit()

    Args:
        dataset: what has a length.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders; the same on all ranks.

    Attributes:
        epoch: the current one.
        processed_indices: the samples of this epoch that need not be dealt any more, as far as
            this rank knows.
        indices: this rank's share of the others, in the order in which they come.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been processed; on all ranks, after the last one."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Take note that a batch of this rank's has been processed.

        Args:
            batch_idx: its number, from 0, since the DataLoader was iterated last.
            batch_size: samples in every batch but a short last one.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Take note that samples have been processed."""
        self.processed_indices.update(map(int, indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch; arguments as for `record_batch`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and what has been processed of it; nothing depends on the ranks."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler was, of this or of any other number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deal what has not been processed to the ranks that there are now.

        All ranks must know the same to be processed: `TorchState` merges what they have
        recorded.
        """
        rank, size = world.rank(), world.size()
        order = self._order()
        if self.processed_indices:
            done = np.fromiter(self.processed_indices, np.int64)
            order = order[~np.isin(order, done)]
        share = -(-len(order) // size)
        self.indices = order[rank::size].tolist()
        if len(self.indices) < share:
            missed = rank - len(order) % size  # of those that get a sample again
            self.indices += islice(cycle(order.tolist()), missed, missed + 1)

    def _order(self) -> Any:
        samples = len(self.dataset)
        # One rank and one batch: the whole epoch in the order that it has for any number of both.
        whole = Sharding(samples, max(samples, 1), 0, 1, self.shuffle, self.seed, allow_empty=True)
        return np.concatenate([*whole.indices(self.epoch), np.empty(0, np.int64)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
