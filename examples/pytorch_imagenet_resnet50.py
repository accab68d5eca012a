"""Train ResNet-50 on a folder of images, or on synthetic ones, with PyTorch.

    mpirun -np 4 python pytorch_imagenet_resnet50.py --train-dir imagenet/train \
        --val-dir imagenet/val --checkpoint-dir checkpoints
    mpirun -np 2 python pytorch_imagenet_resnet50.py --image-size 32 --width 8 --epochs 2

The recipe is that of Goyal et al. 2017 (arXiv:1706.02677). The numbered comments are the steps
that make a script for one process one for N.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import console
import failures
import torch
from images import DataError, ImageFolder, SyntheticImages
from resnet import resnet50
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import hvdlite.torch as hvd


def main() -> None:
    """Train, evaluate and report."""
    options = parse_options()

    # 1. Initialise: from here on, this process has a rank.
    hvd.init()

    # 2. Pin one accelerator to this process or, where there is none, its share of the cores.
    device = hvd.pin_device()

    # 3. Shard the data: every image exactly once per epoch, over all ranks.
    train_set, val_set = failures.agree(hvd, lambda: load_data(options), DataError)
    per_step = options.batch_size * options.batches_per_allreduce
    sampler = hvd.ShardSampler(train_set, per_step, seed=options.seed)
    batches = DataLoader(train_set, batch_sampler=sampler, num_workers=options.workers)

    hvd.seed(options.seed)
    model = resnet50(train_set.classes, options.width).to(device)
    if options.sync_batch_norm:
        model = hvd.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=options.weight_decay
    )

    # 4. Scale the learning rate with the number of ranks, after a warm-up. Adasum needs no scaling.
    lr = options.lr * options.batches_per_allreduce
    ranks = 1 if options.use_adasum else hvd.size()
    warmup = hvd.warmup(lr, options.warmup_epochs * len(sampler), size=ranks)

    # 5. Wrap the optimizer: it steps on the average of all ranks' gradients.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.batches_per_allreduce,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )

    path = Path(options.checkpoint_dir or ".", "pytorch_imagenet_resnet50.npz")
    checkpoint = hvd.checkpoint(path)
    first_epoch = 0
    if options.checkpoint_dir and (state := checkpoint.load(default=None)):
        first_epoch = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # 6. Broadcast the initial state: all ranks begin with that of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    result: dict[str, Any] = {"framework": "pytorch", "processes": hvd.size(), "train_loss": None}
    steps = min(options.steps or len(sampler), len(sampler))
    with hvd.progress(options.epochs * steps, initial=first_epoch * steps) as bar:
        for epoch in range(first_epoch, options.epochs):
            sampler.set_epoch(epoch)
            model.train()
            loss_sum, count = 0.0, 0
            for step, (images, labels), weight in zip(
                range(steps), batches, sampler.sharding.weights, strict=False
            ):
                for group in optimizer.param_groups:
                    done = epoch * len(sampler) + step
                    group["lr"] = warmup(done) * decay(done / len(sampler), options.milestones)
                images, labels = images.to(device), labels.to(device)
                loss_sum += train_step(model, optimizer, images, labels, weight, options.batch_size)
                count += len(labels)
                bar.update(len(labels))

            # 7. Checkpoint: rank 0 alone writes the file.
            if options.checkpoint_dir:
                checkpoint.save(
                    {
                        "epoch": epoch + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    }
                )

            # 8. Average the metrics over all ranks, weighted by their numbers of images.
            average = hvd.average_metrics({"loss": loss_sum / count}, weight=count)
            result["train_loss"] = average["loss"]
            bar.set_postfix(epoch=epoch + 1, loss=average["loss"])

    weights = [each.detach().cpu() for each in model.parameters()]
    result["images_per_s"] = bar.samples_per_s or None
    result["test_accuracy"] = evaluate(model, val_set, options, device)
    console.report(hvd, options.json, result, weights)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--train-dir", help="folder with a folder of images for each class; else synthetic ones")
    add("--val-dir", help="the same for evaluation; default: the training images")
    add("--image-size", type=int, default=224, help="pixels of height and width")
    add("--width", type=int, default=64, help="channels of the first convolution")
    add("--synthetic", type=int, default=1024, help="how many synthetic images to train on")
    add("--classes", type=int, default=10, help="classes of the synthetic images")
    add("--epochs", type=int, default=90)
    add("--steps", type=int, help="stop each epoch after so many optimizer steps")
    add("--batch-size", type=int, default=32, help="images per process and backward pass")
    add("--batches-per-allreduce", type=int, default=1, help="backward passes per step")
    add("--lr", type=float, default=0.0125, help="learning rate of one process")
    add("--warmup-epochs", type=float, default=5, help="until the rate is scaled")
    add("--milestones", type=float, nargs="*", default=[30, 60, 80], help="epochs: rate / 10")
    add("--weight-decay", type=float, default=5e-5)
    add("--seed", type=int, default=42)
    add("--workers", type=int, default=0, help="processes of each rank that load images")
    add("--fp16-allreduce", action="store_true", help="gradients travel as 16-bit floats")
    add("--use-adasum", action="store_true", help="combine steps by Adasum")
    add("--gradient-predivide-factor", type=float, default=1.0)
    add("--sync-batch-norm", action="store_true", help="statistics of all ranks' images")
    add("--checkpoint-dir", help="save each epoch there, and resume from there")
    add("--json", action="store_true", help="end with a line of JSON on standard output")
    return parser.parse_args()


def load_data(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Return the images to train and to evaluate on."""
    size = options.image_size
    if options.train_dir is None:
        train_set = SyntheticImages(options.synthetic, size, options.classes)
        count = max(1, options.synthetic // 4)
        return train_set, SyntheticImages(count, size, options.classes, options.synthetic)
    train_set = ImageFolder(options.train_dir, size, train=True)
    return train_set, ImageFolder(options.val_dir or options.train_dir, size, train=False)


def decay(epoch: float, milestones: list[float]) -> float:
    """Return the factor of the learning rate: a tenth of it after each milestone."""
    return 0.1 ** sum(epoch >= milestone for milestone in milestones)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    weight: float,
    batch_size: int,
) -> float:
    """Take one step of several backward passes, and return the sum of the images' losses.

    The weight is 1, except where a remainder gives one rank an image more than another: it
    makes the average over the ranks the average over the images.
    """
    optimizer.zero_grad()
    total = 0.0
    for start in range(0, len(images), batch_size):
        some = slice(start, start + batch_size)
        loss = cross_entropy(model(images[some]), labels[some], reduction="sum")
        (weight / len(images) * loss).backward()
        total += loss.item()
    optimizer.step()
    return total


@torch.no_grad()
def evaluate(
    model: nn.Module, val_set: Dataset, options: argparse.Namespace, device: torch.device
) -> float:
    """Return the accuracy, every image counted once over all ranks.

    The running statistics of batch normalisation are each rank's own: they are averaged first.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            hvd.allreduce_(buffer)
    model.eval()
    correct, count = 0, 0
    sampler = hvd.ShardSampler(val_set, options.batch_size, shuffle=False, allow_empty=True)
    for images, labels in DataLoader(val_set, batch_sampler=sampler, num_workers=options.workers):
        correct += (model(images.to(device)).argmax(dim=1).cpu() == labels).sum().item()
        count += len(labels)
    totals = hvd.allreduce(torch.tensor([correct, count]), op=hvd.Sum)
    return (totals[0] / totals[1]).item()


if __name__ == "__main__":
    try:
        main()
    except hvd.CheckpointError as error:
        failures.exit_all(hvd, str(error))
