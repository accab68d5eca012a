"""Seeds of PyTorch, and of the workers of a DataLoader."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


class Draws(torch.utils.data.Dataset):
    """One random number of each generator for each sample."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(
            [random.random(), np.random.random(), torch.rand((), dtype=torch.float64)],
            dtype=torch.float64,
        )


def run(n):
    """Return weights, a mask of dropout, and what two workers draw, all after one seed."""
    with hvd.seed(n):
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    mask = (model(torch.ones(8, 4)) == 0).numpy().tobytes()
    loader = torch.utils.data.DataLoader(Draws(), batch_size=2, num_workers=2)
    draws = torch.cat([*loader]).numpy()
    return model[0].weight.detach().numpy().tobytes(), mask, draws


@ranks(2)
def test_weights_dropout_and_workers():
    hvd.init()
    weights, mask, draws = run(3)
    again, other = run(3), run(4)
    assert again[:2] == (weights, mask)
    assert (again[2] == draws).all()
    assert other[0] != weights
    assert len({each[0] for each in hvd.allgather_object((weights,))}) == 1
    masks = hvd.allgather_object((mask, other[1]))
    assert len(set(np.ravel(np.array(masks, object)))) == 2 * hvd.size()
    # 4 samples, 3 generators: all differ by worker, by rank and by seed.
    numbers = np.ravel(hvd.allgather_object([draws, other[2]]))
    assert len(set(numbers.tolist())) == numbers.size == 2 * hvd.size() * 12


@ranks(2)
def test_a_job_that_goes_on_draws_what_an_undisturbed_one_does(tmp_path):
    """As docs/guides/checkpoints.md says."""
    hvd.init()

    def train(path, first_seed, epochs):
        with hvd.seed(first_seed):
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        saved = hvd.checkpoint(path)
        state = saved.load(default={"epoch": 0})
        if "model" in state:
            model.load_state_dict(state["model"])
        for epoch in range(state["epoch"], epochs):
            hvd.seed(1 + epoch)
            for _ in range(2):
                optimizer.zero_grad()
                noise = random.random() + np.random.random()
                model(torch.randn(3, 4) + noise).sum().backward()
                optimizer.step()
            saved.save({"epoch": epoch + 1, "model": model.state_dict()})
        return model[0].weight.detach().numpy().tobytes()

    undisturbed = train(tmp_path / "whole.pt", 0, 3)
    train(tmp_path / "parts.pt", 0, 1)
    assert train(tmp_path / "parts.pt", 99, 3) == undisturbed
