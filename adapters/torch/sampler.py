"""Batches for a DataLoader: every sample once per epoch over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from hvdlite.recipe import Sharding


class ShardSampler(Sampler[list[int]]):
    """A batch sampler that deals a data set to the ranks.

    Every rank makes the same number of steps, no batch is empty, and every sample of the
    data set comes exactly once per epoch, the remainder included. Use it as
    ``DataLoader(dataset, batch_sampler=sampler)``; each new iteration is the next epoch.

    Args:
        dataset: the data set, or its length.
        batch_size: samples per rank and step.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders; the same on all ranks.

    Raises:
        ValueError: there are fewer samples than ranks.
    """

    def __init__(
        self, dataset: Sized | int, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        samples = dataset if isinstance(dataset, int) else len(dataset)
        self.sharding = Sharding(samples, batch_size, shuffle=shuffle, seed=seed)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, that the next iteration gives."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for indices in self.sharding.indices(epoch):
            yield indices.tolist()

    def __len__(self) -> int:
        return self.sharding.steps
