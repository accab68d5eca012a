"""The model and the data of all toys, and the report that each rank writes at its end."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

STEPS, BATCH, RATE = 6, 4, 0.1


class Samples(Dataset):
    """Twice the ranks' steps times their batch: two ranks go through them once."""

    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(2 * STEPS * BATCH, 5, generator=draw)
        self.labels = self.inputs @ torch.randn(5, 3, generator=draw)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Net(nn.Module):
    """A model whose first weights are the same in each process."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=draw) / 4)

    def forward(self, inputs, labels):
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


def loss_of(model, samples):
    """Return a model's loss on all samples."""
    with torch.no_grad():
        return float(model(samples.inputs, samples.labels)["loss"])


def write(folder, weights):
    """Write a rank's weights, and the class of the group that it has trained in."""
    import torch.distributed as dist

    group = type(dist.distributed_c10d._get_default_group())
    found = {"weights": weights, "group": f"{group.__module__}.{group.__name__}"}
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))
