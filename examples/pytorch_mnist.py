"""Train a small convolutional network on handwritten digits with PyTorch.

    python pytorch_mnist.py
    mpirun -np 2 python pytorch_mnist.py --data-dir mnist

The numbered comments are the steps that make a script for one process one for N.
"""

from __future__ import annotations

import math
from pathlib import Path

import console
import failures
import torch
from digits import CLASSES, Samples
from plan import Plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd


def main() -> None:
    """Train, evaluate and report."""
    options = console.parse_options(__doc__)

    # 1. Initialise: from here on, this process has a rank.
    hvd.init()

    # 2. Pin one accelerator to this process or, where there is none, its share of the cores.
    device = hvd.pin_device()

    # 3. Shard the data: every image exactly once per epoch, over all ranks.
    data = failures.load_data(hvd, options.data_dir)
    train_set = as_dataset(data.train, device)
    sampler = hvd.ShardSampler(train_set, options.batch_size, seed=options.seed)
    batches = DataLoader(train_set, batch_sampler=sampler)

    # The ranks begin with different weights on purpose: step 6 makes them equal.
    hvd.seed(options.seed)
    model = make_model(*data.train.images.shape[1:]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    plan = Plan(options, steps_per_epoch=len(sampler))
    warmup = hvd.warmup(options.lr, plan.warmup_steps)

    # 5. Wrap the optimizer: it steps on the average of all ranks' gradients.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, options.compression),
    )

    checkpoint = hvd.checkpoint(Path(options.checkpoint_dir or ".", "pytorch_mnist.npz"))
    first_epoch = 0
    if options.checkpoint_dir and (state := checkpoint.load(default=None)):
        first_epoch = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # 6. Broadcast the initial state: all ranks begin with that of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    train_loss = None
    with hvd.progress(plan.last_step, initial=first_epoch * len(sampler)) as bar:
        for epoch, steps in plan.epochs(first_epoch):
            sampler.set_epoch(epoch)
            loss_sum, count = 0.0, 0
            for step, (images, labels), weight in zip(
                steps, batches, sampler.sharding.weights, strict=False
            ):
                for group in optimizer.param_groups:
                    group["lr"] = warmup(step) * plan.decay(step)
                loss = train_step(model, optimizer, images, labels, weight)
                loss_sum += loss * len(labels)
                count += len(labels)
                bar.update(len(labels))

            # 7. Checkpoint: rank 0 alone writes the file.
            if options.checkpoint_dir and len(steps) == len(sampler):
                checkpoint.save(
                    {
                        "epoch": epoch + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    }
                )

            # 8. Average the metrics over all ranks, weighted by their numbers of images.
            train_loss = hvd.average_metrics({"loss": loss_sum / count}, weight=count)["loss"]
            bar.set_postfix(epoch=epoch + 1, loss=train_loss)

    weights = [tensor.cpu() for tensor in model.state_dict().values()]
    result = {
        "framework": "pytorch",
        "processes": hvd.size(),
        "images_per_s": bar.samples_per_s or None,
        "train_loss": train_loss,
        "test_accuracy": evaluate(model, as_dataset(data.test, device)),
    }
    console.report(hvd, options.json, result, weights)


def as_dataset(samples: Samples, device: torch.device) -> TensorDataset:
    """Return images of shape (1, height, width) with their labels."""
    images = torch.from_numpy(samples.images).unsqueeze(1)
    return TensorDataset(images.to(device), torch.from_numpy(samples.labels).to(device))


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


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    weight: float,
) -> float:
    """Take one step, and return this rank's mean loss.

    The weight is 1, except where a remainder gives one rank an image more than another: it
    makes the average over the ranks the average over the images.
    """
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    (weight * loss).backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """Return the accuracy on the test images, each counted once over all ranks."""
    correct, count = 0, 0
    sampler = hvd.ShardSampler(test_set, batch_size=256, shuffle=False)
    for images, labels in DataLoader(test_set, batch_sampler=sampler):
        correct += (model(images).argmax(dim=1) == labels).sum().item()
        count += len(labels)
    return hvd.average_metrics({"accuracy": correct / count}, weight=count)["accuracy"]


if __name__ == "__main__":
    try:
        main()
    except hvd.CheckpointError as error:
        failures.exit_all(hvd, str(error))
