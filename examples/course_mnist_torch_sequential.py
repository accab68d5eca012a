"""Train a convolutional network on handwritten digits with PyTorch, on one process.

    python course_mnist_torch_sequential.py --data-dir mnist

`course_mnist_torch.py` is this script for N processes: compare them with `diff`.
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


def main() -> None:
    """Train, and print the metrics of each epoch."""
    options = course_common.parse_options(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)

    data = course_common.load_digits(options.data_dir)
    train_set, test_set = as_dataset(data.train), as_dataset(data.test)
    batches = DataLoader(train_set, options.batch_size, shuffle=True)
    test_batches = DataLoader(test_set, batch_size=256)

    model = make_model(*data.train.images.shape[1:]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        train = train_epoch(model, optimizer, batches, device)
        seconds = time.perf_counter() - start
        if options.checkpoint:
            torch.save({"model": model.state_dict()}, options.checkpoint)
        test = evaluate(model, test_batches, device)
        print(
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
    return {"loss": loss_sum / count, "accuracy": correct / count}


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device: torch.device) -> dict[str, float]:
    """Return the accuracy on the batches."""
    correct, count = 0, 0
    for images, labels in batches:
        outputs = model(images.to(device))
        correct += (outputs.argmax(dim=1) == labels.to(device)).sum().item()
        count += len(labels)
    return {"accuracy": correct / count}


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
