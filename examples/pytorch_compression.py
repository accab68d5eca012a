"""Train on handwritten digits with PyTorch, and exchange far fewer bytes in each step.

    python pytorch_compression.py
    mpirun -np 2 python pytorch_compression.py --compression powersgd --data-dir mnist

It pays where the network between the processes is slow: `hvdlite bench compression` says
whether it does here. The numbered comments are the steps that make a script for one process one
for N.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    options = console.parse_options(__doc__, compressions=("topk", "powersgd", "none"))

    # 1. Initialise. 2. Pin one accelerator to this process, or its share of the cores.
    hvd.init()
    device = hvd.pin_device()

    # 3. Shard the data.
    data = failures.load_data(hvd, options.data_dir)
    train_set = as_dataset(data.train, device)
    sampler = hvd.ShardSampler(train_set, options.batch_size, seed=options.seed)
    batches = DataLoader(train_set, batch_sampler=sampler)

    hvd.seed(options.seed)
    model = make_model(data.train.images[0].size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    plan = Plan(options, steps_per_epoch=len(sampler))
    warmup = hvd.warmup(options.lr, plan.warmup_steps)

    # 5. Wrap the optimizer, and say how gradients travel.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=make_compression(options.compression, int(plan.warmup_steps)),
    )

    checkpoint = hvd.checkpoint(Path(options.checkpoint_dir or ".", "pytorch_compression.npz"))
    first_epoch = 0
    if options.checkpoint_dir and (state := checkpoint.load(default=None)):
        first_epoch = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # 6. Broadcast the initial state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    train_loss = None
    with hvd.progress(plan.last_step, initial=first_epoch * len(sampler)) as bar:
        for epoch, steps in plan.epochs(first_epoch):
            sampler.set_epoch(epoch)
            loss_sum, count = 0.0, 0
            for step, (images, labels) in zip(steps, batches, strict=False):
                for group in optimizer.param_groups:
                    group["lr"] = warmup(step) * plan.decay(step)
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                # A remainder may give one rank an image more than another: each image counts alike.
                optimizer.step(batch_size=len(labels))
                loss_sum += loss.item() * len(labels)
                count += len(labels)
                bar.update(len(labels))

            # 7. Checkpoint: rank 0 alone writes the file. What the compression has left to send is
            # each rank's own, so before that all ranks take the average of it.
            if options.checkpoint_dir and len(steps) == len(sampler):
                optimizer.consolidate_exchange_state()
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
        "train_loss": train_loss,
        "test_accuracy": evaluate(model, as_dataset(data.test, device)),
    }
    console.report(hvd, options.json, result, weights)


def make_compression(name: str, dense_steps: int) -> Any:
    """Return the compression of gradients.

    In the first steps they travel as they are. Later the ranks exchange the greatest hundredth of
    all entries, or two thin matrices for each matrix; the error that this makes in a step is
    added to the gradients of the next, so nothing is lost for good.

    Args:
        name: of the compression.
        dense_steps: how many steps are the first.
    """
    kinds = {
        "topk": hvd.Compression.TopK(0.01),
        "powersgd": hvd.Compression.PowerSGD(rank=4),
    }
    if name not in kinds:
        return hvd.Compression.none
    return hvd.Compression.ErrorFeedback(hvd.Compression.WarmUp(kinds[name], dense_steps))


def as_dataset(samples: Samples, device: torch.device) -> TensorDataset:
    """Return flat images with their labels."""
    images = torch.from_numpy(samples.images).flatten(1)
    return TensorDataset(images.to(device), torch.from_numpy(samples.labels).to(device))


def make_model(pixels: int) -> nn.Module:
    """Return the network, for images of so many pixels."""
    return nn.Sequential(
        nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


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
