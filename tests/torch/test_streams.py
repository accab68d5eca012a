"""Iterable data sets of unknown length, with and without workers."""

from __future__ import annotations

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import hvdlite.torch as hvd
from hvdlite import recipe


class Lines(IterableDataset):
    """Samples of unknown number, as a file has them; each worker reads its own by default."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from ((torch.full((2,), float(n)), n) for n in range(first, self.count, step))


@ranks(2)
def test_every_sample_once_with_workers():
    hvd.init()
    for samples, workers in ((hvd.size() * 6 + 1, 0), (23, 2)):
        stream = hvd.ShardStream(Lines(samples), batch_size=3)
        loader = DataLoader(stream, batch_size=None, num_workers=workers)
        expected = list(recipe.shard(iter(range(samples)), 3, shuffle=False))
        for _ in range(2 if not workers else 1):
            batches = list(loader)
            assert [labels.tolist() for _, labels in batches] == expected
            for inputs, labels in batches:
                assert inputs.tolist() == [[n, n] for n in labels.tolist()]
        own = hvd.allgather_object([n for batch in expected for n in batch])
        assert sorted(n for each in own for n in each) == list(range(samples))
    lists = hvd.ShardStream(Lines(9), 4, collate_fn=len)
    assert sum(hvd.allgather_object(sum(lists))) == 9


@ranks(2)
def test_training_on_a_stream_equals_one_process():
    """Batches that differ in size at the end, weighted by their samples."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def train(batches, optimizer, parameter, weighted):
        for inputs, _ in batches:
            optimizer.zero_grad()
            ((parameter * inputs - 1) ** 2).mean().backward()
            optimizer.step(**({"batch_size": len(inputs)} if weighted else {}))
        return parameter.detach()

    alone, shared = (torch.ones(2, requires_grad=True) for _ in range(2))
    stream = hvd.ShardStream(Lines(13), 3)  # steps of 6 and 7 samples
    assert [len(labels) for _, labels in stream] == [3, 4 - rank]
    whole = [(torch.arange(a, b)[:, None] + torch.zeros(2), 0) for a, b in ((0, 6), (6, 13))]
    plain = torch.optim.SGD([alone], lr=1e-3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([shared], lr=1e-3), named_parameters=[("weight", shared)]
    )
    found = train(stream, optimizer, shared, weighted=True)
    torch.testing.assert_close(found, train(whole, plain, alone, weighted=False))
    # Split already, with different lengths, as files are: the same number of steps.
    steps = len(list(hvd.lockstep(DataLoader(Lines(4 + 3 * rank), batch_size=2))))
    assert steps == 2
    predictions = hvd.gather(shared.expand(rank, 2), [rank] * rank)
    assert predictions.shape == (size - 1, 2)
