"""Train small networks on digits with each strategy: traffic and accuracy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdlite.torch as hvd
from examples import digits
from tests.benchmarks.strategies import DENSE, Entry
from tests.benchmarks.traffic import Traffic

BATCH = 128
"""Samples of all ranks in a step."""

_WIDTHS = (256, 128)
_PIXELS = 28 * 28  # of the model whose traffic is counted
_STEPS, _FIRST_COUNTED = 25, 5

Model = torch.nn.Sequential


class Data:
    """A data set in memory: MNIST from a folder, or scikit-learn's digits."""

    def __init__(self, folder: Path | None) -> None:
        loaded = digits.load(folder)
        self.images, self.labels = _tensors(loaded.train)
        self.test_images, self.test_labels = _tensors(loaded.test)

    def batches(self, seed: int, epoch: int) -> Iterator[Any]:
        """Return the samples' positions in whole batches, shuffled anew for each epoch."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self.labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


def bytes_per_step(comm: Any, entry: Entry, traffic: Traffic) -> float:
    """Return the bytes that a rank sends per step for a fixed model; collective.

    It is the mean over the ranks and some steps, agreement on what is sent included.
    """
    model = make_model(_PIXELS, seed=0)
    optimizer = distributed(model, entry)
    draw = np.random.default_rng(comm.rank)
    before = 0
    for step in range(_STEPS):
        if step == _FIRST_COUNTED:  # parameters have been compared, and buckets packed anew
            before = traffic.sent()
        images = torch.from_numpy(draw.random((BATCH // comm.size, _PIXELS), np.float32))
        labels = torch.from_numpy(draw.integers(digits.CLASSES, size=len(images)))
        train_step(model, optimizer, images, labels)
    sent = comm.allreduce(traffic.sent() - before)
    return float(sent) / comm.size / (_STEPS - _FIRST_COUNTED)


def accuracy(comm: Any, entry: Entry | None, data: Data, seed: int, epochs: int) -> float:
    """Train, and return the share of the test images that are recognised; collective.

    Each rank gets its share of each batch; without an entry it trains by itself on whole batches.
    """
    share = slice(None) if entry is None else slice(comm.rank, None, comm.size)
    model = make_model(data.images.shape[1], seed)
    optimizer = _sgd(model, DENSE) if entry is None else distributed(model, entry)
    for epoch in range(epochs):
        for batch in data.batches(seed, epoch):
            own = batch[share]
            train_step(model, optimizer, data.images[own], data.labels[own])
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    digests = comm.allgather(hashlib.sha256(weights).hexdigest())
    assert len(set(digests)) == 1, f"{entry}: the ranks have different weights: {digests}"
    with torch.no_grad():
        found = model(data.test_images).argmax(dim=1)
    return float((found == data.test_labels).double().mean())


def _tensors(samples: digits.Samples) -> tuple[torch.Tensor, torch.Tensor]:
    images = samples.images.reshape(len(samples.images), -1)
    return torch.from_numpy(images), torch.from_numpy(samples.labels)


def make_model(pixels: int, seed: int, widths: Sequence[int] = _WIDTHS) -> Model:
    """Return fully connected layers with ReLUs in between; a seed gives the same weights."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for before, after in zip((pixels, *widths), widths, strict=False):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], digits.CLASSES))


def _sgd(model: Model, entry: Entry) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), entry.learning_rate, momentum=entry.momentum)


def distributed(model: Model, entry: Entry) -> Any:
    """Return an optimizer that exchanges gradients by a strategy."""
    return hvd.DistributedOptimizer(_sgd(model, entry), model.named_parameters(), entry.strategy)


def train_step(model: Model, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train on a batch once."""
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
