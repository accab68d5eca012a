"""Train with automatic mixed precision, loss scaling, clipping and accumulation in PyTorch.

    python pytorch_amp.py
    mpirun -np 2 python pytorch_amp.py --accumulate 2 --clip 1.0

The numbered comments are the steps that make a script for one process one for N.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import console
import failures
import torch
from digits import CLASSES, Samples
from plan import Plan
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    """Train, evaluate and report."""
    options = console.parse_options(__doc__, add_options)

    # 1. Initialise. 2. Pin one accelerator to this process, or its share of the cores.
    hvd.init()
    device = hvd.pin_device()
    dtype = DTYPES[options.dtype or ("float16" if device.type == "cuda" else "bfloat16")]

    # 3. Shard the data: a step takes several batches, one for each backward pass.
    data = failures.load_data(hvd, options.data_dir)
    train_set = as_dataset(data.train, device)
    per_step = options.batch_size * options.accumulate
    sampler = hvd.ShardSampler(train_set, per_step, seed=options.seed)
    batches = DataLoader(train_set, batch_sampler=sampler)

    hvd.seed(options.seed)
    model = make_model(data.train.images[0].size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    plan = Plan(options, steps_per_epoch=len(sampler))
    warmup = hvd.warmup(options.lr, plan.warmup_steps)

    # 5. Wrap the optimizer: gradients are exchanged in the last of a step's backward passes.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, options.compression),
        backward_passes_per_step=options.accumulate,
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=options.init_scale)

    # 6. Broadcast the initial state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    train_loss = None
    with hvd.progress(plan.last_step) as bar:
        for _, steps in plan.epochs(0):
            loss_sum, count = 0.0, 0
            for step, (images, labels), weight in zip(
                steps, batches, sampler.sharding.weights, strict=False
            ):
                for group in optimizer.param_groups:
                    group["lr"] = warmup(step) * plan.decay(step)
                optimizer.zero_grad()
                for part in parts(len(images), options.batch_size):
                    with torch.autocast(device.type, dtype):
                        output = model(images[part])
                    loss = cross_entropy(output.float(), labels[part], reduction="sum")
                    # One image counts as much as another, in any pass and on any rank.
                    scaler.scale(weight / len(images) * loss).backward()
                    loss_sum += loss.item()

                # Wait for the averages, unscale and clip them. An overflow on one rank is in the
                # averages of all, so all leave the step out, and lower the scale.
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(options.clip)
                scaler.step(optimizer)
                scaler.update()
                count += len(images)
                bar.update(len(images))

            # 8. Average the metrics over all ranks. (7., checkpoints, is in pytorch_mnist.py.)
            train_loss = hvd.average_metrics({"loss": loss_sum / count}, weight=count)["loss"]

    weights = [tensor.cpu() for tensor in model.state_dict().values()]
    result = {
        "framework": "pytorch",
        "processes": hvd.size(),
        "train_loss": train_loss,
        "test_accuracy": evaluate(model, as_dataset(data.test, device)),
        "scale": scaler.get_scale(),
    }
    console.report(hvd, options.json, result, weights)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this script alone."""
    add = parser.add_argument
    add("--accumulate", type=int, default=2, help="backward passes per optimizer step")
    add("--clip", type=float, default=1.0, help="largest norm of the averaged gradients")
    add("--dtype", choices=DTYPES, help="default: float16 on CUDA, else bfloat16")
    add("--init-scale", type=float, default=2.0**16, help="of the loss, to begin with")


def as_dataset(samples: Samples, device: torch.device) -> TensorDataset:
    """Return flat images with their labels."""
    images = torch.from_numpy(samples.images).flatten(1)
    return TensorDataset(images.to(device), torch.from_numpy(samples.labels).to(device))


def make_model(pixels: int) -> nn.Module:
    """Return the network, for images of so many pixels."""
    return nn.Sequential(
        nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def parts(count: int, batch_size: int) -> Sequence[slice]:
    """Cut a step's samples into batches."""
    return [slice(start, start + batch_size) for start in range(0, count, batch_size)]


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
    main()
