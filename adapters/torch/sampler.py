"""Samplers and data sets for DataLoader that distribute data over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker

from hvdlite.recipe import Sharding, Stream, batches
from hvdlite.recipe.sharding import epoch_order
from hvdlite.torch.state import watch_steps
from hvdlite.world import parts, world


class ShardSampler(Sampler[list[int]]):
    """A batch sampler that distributes a data set over the ranks.

    Every rank makes the same number of steps, no batch is empty, and every sample of the
    data set comes exactly once per epoch, the remainder included. Use it as
    ``DataLoader(dataset, batch_sampler=sampler)``.

    Each iteration is one epoch. After its last batch, the next iteration is the next epoch; an
    abandoned iteration (for example to look at the first batch, on one rank) changes nothing. To
    end an epoch early, call `set_epoch` on all ranks. The workers of a DataLoader prefetch
    batches (``num_workers * prefetch_factor`` and one), so a look at an epoch with no more batches
    than that takes all of them: call `set_epoch` after it, too.

    Args:
        dataset: the data set, or its length.
        batch_size: samples per rank and step.
        shuffle: whether to permute the samples in each epoch.
        seed: of the permutations; the same on all ranks.
        allow_empty: whether to accept fewer samples than ranks. Ranks without a sample then
            make no step, so this is for evaluation, where a step has no collective.

    Raises:
        ValueError: there are fewer samples than ranks, and ``allow_empty`` is False.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        allow_empty: bool = False,
    ) -> None:
        samples = dataset if isinstance(dataset, int) else len(dataset)
        sharding = Sharding(
            samples, batch_size, shuffle=shuffle, seed=seed, allow_empty=allow_empty
        )
        self._batches = batches.load(range(samples), sharding, is_ahead=True)
        self._batches.content = [batches.checksum(dataset)]
        if world.size() > 1:
            watch_steps()

    @property
    def sharding(self) -> Sharding:
        """The distribution of the iteration in progress, or of the next one."""
        return self._batches.sharding

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, of the next iteration: the same on all ranks.

        After `load_state_dict`, the epoch of the state keeps its position.
        """
        self._batches.set_epoch(epoch)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint: the same on all ranks.

        Args:
            step: the steps that the iteration in progress, or the last one, has made. None: as many
                as it has yielded batches, which are more where workers of a DataLoader prefetch.
                With virtual ranks, where a step takes several batches, it can be left out.

        Raises:
            ValueError: ``step`` is not one of the iteration's.

        Example::

            for step, (images, labels) in enumerate(loader, start=1):
                ...
                if step % 100 == 0:
                    checkpoint.save({"model": ..., "data": sampler.state_dict(step)})
        """
        return self._batches.state_dict(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that `state_dict` has returned, on any number of ranks.

        The next iteration takes the rest of that epoch, ``state["epoch"]``: every sample that no
        rank had taken, once. The batch size may differ, too.

        Raises:
            ValueError: the state belongs to another number of samples, another seed or another
                ``shuffle``; or fewer samples are left than there are ranks.
        """
        self._batches.load_state_dict(state)

    def __iter__(self) -> Iterator[list[int]]:
        if sys._getframe(1).f_code is BatchSampler.__iter__.__code__:
            raise TypeError(
                f"rank {world.rank()}: ShardSampler yields batches, and not samples: pass it to "
                "the DataLoader as batch_sampler=, without batch_size, shuffle and drop_last"
            )
        self._batches.trains = torch.is_grad_enabled()
        # A DataLoader cannot collate an empty batch.
        return filter(None, self._batches.requests())

    def __len__(self) -> int:
        upcoming = self._batches.upcoming
        has_samples = upcoming.rank < upcoming.samples - upcoming.done
        return upcoming.steps if has_samples else 0


class ShardStream(IterableDataset[Any]):
    """This rank's batches of an iterable data set of unknown length.

    Every rank, and every worker of its DataLoader, reads all samples, keeps its own and drops the
    others, so all must read the same ones in the same order: a shuffle in the data set needs a
    generator of its own, with the same seed on all ranks. A data set that divides its samples among
    the workers by itself (``get_worker_info``) gives all to each here. Sample ``i`` belongs to rank
    ``i % size``, and workers assemble batches by turns. Every sample comes once, and all ranks make
    the same number of steps. At the end the last batch is smaller or, on some ranks, has one sample
    more; ``optimizer.step(batch_size=len(labels))`` weights it by its samples. For data that are
    split already, use `lockstep`.

    Example::

        stream = hvd.ShardStream(dataset, batch_size=64)
        loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=4)

    Args:
        dataset: an iterable of samples. A generator can be read once, and by no worker.
        batch_size, allow_empty: as for `ShardSampler`.
        collate_fn: makes a batch of a list of samples; None: as a DataLoader does.

    Raises:
        ValueError: the batch size is out of range; from the iteration: there are fewer samples than
            ranks, and ``allow_empty`` is False.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        allow_empty: bool = False,
    ) -> None:
        self._stream = Stream(dataset, batch_size, allow_empty=allow_empty)
        self._collate = collate_fn or default_collate

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = self._stream.part(number, count)
        while True:
            # Many data sets divide their samples among the workers by themselves, by this number,
            # and each worker would keep its part of a part.
            torch_worker._worker_info = None
            try:
                batch = next(own, None)
            finally:
                torch_worker._worker_info = worker
            if batch is None:
                return
            yield self._collate(batch)


class ElasticSampler(Sampler[int]):
    """A sampler that distributes the unprocessed samples of an epoch over the ranks.

    Every sample comes once per epoch over all ranks, also if the number of ranks changes within
    the epoch: samples that a rank has recorded as processed do not come again. Those that a rank
    which died has recorded since the last reset do, as in Horovod, since no other rank knows them.
    The samples of a step are the next ``batch_size * size`` of the epoch's order, which depends on
    ``(seed, epoch)`` alone.

    A DataLoader assembles its batches itself, so every rank must get the same number of samples
    to make the same number of steps. If they do not divide evenly, the first ones are repeated
    on at most ``size - 1`` ranks, as in Horovod. `ShardSampler`, which makes the batches itself,
    repeats none in either case; its `state_dict` is a position between two steps that all ranks
    have made.

    Give it to `TorchState` as one of the keywords, and record each batch::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

        for batch, (images, labels) in enumerate(loader):
            ...
            state.sampler.record_batch(batch, 32)
            state.commit()

    Args:
        dataset: any object with a length.
        shuffle, seed: as for `ShardSampler`.

    Attributes:
        epoch: the current one.
        processed_indices: the processed samples of this epoch, as far as this rank knows.
        indices: this rank's share of the others, in order.
        rank: this process's at the last `reset`.
        num_replicas: the number of ranks then.
        num_samples: each rank's share.
        total_size: the shares of all ranks, with the samples that are repeated.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        parts.current.refuse("ElasticSampler", "use hvd.ShardSampler")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch without processed samples; on all ranks, after the previous epoch."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed a batch.

        Args:
            batch_idx: number of the batch, from 0, in this iteration of the DataLoader.
            batch_size: samples in every batch except a shorter last one.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that samples have been processed."""
        self.processed_indices.update(map(int, indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch; arguments as for `record_batch`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its processed samples, independent of the number of ranks."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a sampler for this or any other number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Distribute the unprocessed samples over the current ranks.

        All ranks must have the same processed samples: `TorchState` merges their records.
        """
        rank, size = self.rank, self.num_replicas = world.rank(), world.size()
        order = epoch_order(len(self.dataset), self.epoch, self.shuffle, self.seed)
        if self.processed_indices:
            done = np.fromiter(self.processed_indices, np.int64)
            order = order[~np.isin(order, done)]
        self._remaining = order
        self.num_samples = -(-len(order) // size)
        self.total_size = self.num_samples * size
        self.indices = order[rank::size].tolist()
        if len(self.indices) < self.num_samples:
            missed = rank - len(order) % size  # index among the ranks that repeat a sample
            self.indices += islice(cycle(order.tolist()), missed, missed + 1)

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that were not processed at the last `reset`, in the data set's order."""
        return np.sort(self._remaining).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
