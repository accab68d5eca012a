"""Train a convolutional network on handwritten digits with PyTorch, on N processes.

    hvdliterun -np 2 python course_mnist_torch.py --data-dir mnist

`course_mnist_torch_sequential.py` is this script for one process: compare them with `diff`.
"""

from __future__ import annotations

import math
import time

import course_common
import torch
from digits import CLASSES, Samples
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd


def main() -> None:
    """Train, and print the metrics of each epoch."""
    options = course_common.parse_options(__doc__)
    hvd.init()  # 1. Initialise: from here on, this process has a rank.
    device = hvd.pin_device()  # 2. Pin one accelerator, or a share of the cores, to each rank.
    torch.manual_seed(options.seed)

    data = course_common.load_digits(options.data_dir, hvd)
    train_set, test_set = as_dataset(data.train), as_dataset(data.test)
    # 3. Shard the data: every image exactly once per epoch, over all ranks.
    sampler = hvd.ShardSampler(train_set, options.batch_size)
    batches = DataLoader(train_set, batch_sampler=sampler)
    test_sampler = hvd.ShardSampler(test_set, batch_size=256, shuffle=False)
    test_batches = DataLoader(test_set, batch_sampler=test_sampler)

    model = make_model(*data.train.images.shape[1:]).to(device)
    lr = hvd.scale_lr(options.lr)  # 4. Scale the learning rate with the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    # 5. Wrap the optimizer: it steps on the average of all ranks' gradients.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # 6. Broadcast the initial state: all ranks begin with that of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        train = train_epoch(model, optimizer, batches, device)
        seconds = time.perf_counter() - start
        if options.checkpoint:
            # 7. Checkpoint: rank 0 alone writes the file.
            hvd.checkpoint(options.checkpoint).save({"model": model.state_dict()})
        test = evaluate(model, test_batches, device)
        hvd.on_rank_zero(print)(
            f"epoch {epoch}: {seconds:.1f} s, loss {train['loss']:.4f}, "
            f"accuracy {train['accuracy']:.4f}, test accuracy {test['accuracy']:.4f}"
        )


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader, device: torch.device
) -> dict[str, float]:
    """Take one step for each batch, and return the means over the images."""
    loss_sum, correct, count = 0.0, 0, 0
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(images)
        loss = cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        correct += (outputs.argmax(dim=1) == labels).sum().item()
        count += len(labels)
    # 8. Average the metrics over all ranks, weighted by their numbers of images.
    return hvd.average_metrics({"loss": loss_sum / count, "accuracy": correct / count}, count)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device: torch.device) -> dict[str, float]:
    """Return the accuracy on the batches."""
    correct, count = 0, 0
    for images, labels in batches:
        outputs = model(images.to(device))
        correct += (outputs.argmax(dim=1) == labels.to(device)).sum().item()
        count += len(labels)
    return hvd.average_metrics({"accuracy": correct / count}, count)


def as_dataset(samples: Samples) -> TensorDataset:
    """Return images of shape (1, height, width) with their labels."""
    images = torch.from_numpy(samples.images).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(samples.labels))


def make_model(height: int, width: int) -> nn.Module:
    """Return the network, for images of this size."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(32 * math.ceil(height / 4) * math.ceil(width / 4), CLASSES),
    )


if __name__ == "__main__":
    main()
