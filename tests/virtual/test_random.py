"""Random training programs with virtual ranks: the same bits for any number of processes."""

import copy
import hashlib
import random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import hvdlite
import hvdlite.torch as hvd

PROCESSES, SEEDS = (1, 2, 3), range(10)
C = hvd.Compression
STRATEGIES = [
    C.none,
    C.fp16,
    C.bf16,
    C.TopK(0.2),
    C.ErrorFeedback(C.TopK(0.1)),
    C.ErrorFeedback(C.Sign()),
    C.PowerSGD(2),
    C.QSGD(),
    C.TernGrad(),
    C.RandomK(0.3),
    C.DeepGradientCompression(0.1),
    C.ByParameter(lambda each: C.none if len(each.shape) < 2 else C.fp16, [C.none, C.fp16]),
]
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.005}),
    (torch.optim.SGD, {"lr": 0.002, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
]
FEATURES, SAMPLES = 6, 37


class Model(torch.nn.Module):
    """Layers of which a step may leave out some."""

    def __init__(self, draw):
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 9)
        self.normalises = draw.random() < 0.4
        norm = torch.nn.BatchNorm1d(9, momentum=draw.choice([0.1, None]))
        self.norm = norm if self.normalises else torch.nn.Identity()
        self.drop = torch.nn.Dropout(draw.choice([0.0, 0.3]))
        self.branches = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(3))
        self.table = torch.nn.Embedding(11, FEATURES, sparse=draw.random() < 0.3)
        self.last = torch.nn.Linear(9, 3)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, rows, branches):
        hidden = x if rows is None else x + self.table(rows)
        hidden = self.drop(self.norm(torch.relu(self.first(hidden))))
        for number in branches:
            hidden = hidden + torch.relu(self.branches[number](hidden))
        return self.last(hidden) * self.scale


def batches(draw, seed, data, normalises):
    """Return a function that iterates an epoch's batches, and whether they may be uneven."""
    # A part of one sample cannot be normalised.
    kind = "own" if normalises else draw.choice(["shard", "sampler", "own"])
    size = draw.randint(2, 5)
    shards = hvd.shard(data, size) if kind == "shard" else None
    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, data))
    sampler = hvd.ShardSampler(dataset, size) if kind == "sampler" else None

    def epoch(number, optimizer):
        if kind == "shard":
            yield from (tuple(map(torch.from_numpy, batch)) for batch in shards)
        elif kind == "sampler":
            sampler.set_epoch(number)
            yield from torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
        else:
            for step in range(4):
                stepped = False
                while not stepped:
                    key = [seed, number, step, hvd.virtual_rank()]
                    chosen = np.random.default_rng(key).integers(0, SAMPLES, size)
                    yield tuple(torch.from_numpy(each[chosen]) for each in data)
                    stepped = optimizer.stepped

    return epoch, kind != "own"


def train(seed):
    """Train by the program of a seed; return the digest of the weights and buffers."""
    draw = random.Random(seed)
    hvd.init(virtual_ranks=draw.randint(4, 8))
    with hvd.seed(seed):
        model = Model(draw)
    is_sparse = model.table.sparse
    make, options = draw.choice(OPTIMIZERS[: 1 if is_sparse else None])
    inner = make(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, draw.choice([1.0, 0.9]))
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=list(model.named_parameters()),
        model=model,
        op=draw.choice([hvd.Average, hvd.Sum]),
        compression=C.none if is_sparse else draw.choice(STRATEGIES),
        sparse_as_dense=is_sparse,
    )
    generator = np.random.default_rng(seed)
    data = generator.standard_normal((SAMPLES, FEATURES), np.float32)
    data = data, generator.integers(0, 11, SAMPLES)
    epoch, is_uneven = batches(draw, seed, data, model.normalises)
    averages = optimizer._reducer.op == hvd.Average
    is_weighted = is_uneven and averages and draw.random() < 0.5
    by_rank, step = draw.random() < 0.4, 0
    for number in range(2):
        for x, rows in epoch(number, optimizer):
            # Which layers take part is the step's choice, or also the virtual rank's.
            own = random.Random(f"{seed} {step} {by_rank and hvd.virtual_rank()}")
            used = [each for each in range(3) if own.random() < 0.6]
            optimizer.zero_grad()
            output = model(x, rows if own.random() < 0.7 else None, used)
            (output.square().mean() * (1 + torch.rand(()))).backward()
            optimizer.step(**({"batch_size": len(x)} if is_weighted else {}))
            if not optimizer.stepped:
                continue
            step += 1
            scheduler.step()
            change = random.Random(f"{seed} {step}").random()
            if change < 0.1:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            elif change < 0.3:
                optimizer.consolidate_exchange_state()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif change < 0.4:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
    values = [each.numpy().tobytes() for each in model.state_dict().values()]
    hvd.shutdown()
    return hashlib.sha256(b"".join(values)).hexdigest()


@pytest.mark.slow
def test_random_programs():
    def job():
        return [train(seed) for seed in SEEDS]

    expected = None
    for number in PROCESSES:
        digests = hvdlite.run(job, np=number)
        assert len(digests) == number
        expected = expected or digests[0]
        assert digests == [expected] * number, number
    assert len(set(expected)) == len(SEEDS)
