"""A batch sampler for DataLoader: each sample once per epoch over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from hvdlite.recipe import Batches, Sharding


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
        shuffle: whether to permute the samples anew in each epoch.
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
        self.sharding = Sharding(
            samples, batch_size, shuffle=shuffle, seed=seed, allow_empty=allow_empty
        )
        self._batches = Batches(range(samples), self.sharding)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, of the next iteration: the same on all ranks."""
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader cannot collate an empty batch.
        return (batch for batch in self._batches if batch)

    def __len__(self) -> int:
        has_samples = self.sharding.rank < self.sharding.samples
        return self.sharding.steps if has_samples else 0
