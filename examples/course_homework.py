"""Solve the course's homework: time and accuracy of MNIST on N processes, by warm-up.

    hvdliterun -np 4 python course_homework.py --data-dir mnist --epochs 6

It trains once for each number of `--warmup-epochs`, each time from the same initial weights, and
writes the training and the validation accuracy after each epoch to `accuracy_4.pdf`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import course_common
import course_plot
import torch
from course_mnist_torch import as_dataset, evaluate, make_model, train_epoch
from digits import Digits
from torch.utils.data import DataLoader

import hvdlite.torch as hvd


def main() -> None:
    """Train with and without warm-up, print a table and draw the curves."""
    options = course_common.parse_options(__doc__, add_options)
    course_plot.check_matplotlib()
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    hvd.init()
    log = hvd.on_rank_zero(print)
    device = hvd.pin_device()
    data = course_common.load_digits(options.data_dir, hvd)

    curves = {}
    log("| ranks | warm-up epochs | s per epoch | images/s | training | validation |")
    log("|---|---|---|---|---|---|")
    for warmup_epochs in options.warmup_epochs:
        accuracies, seconds = train(data, device, warmup_epochs, options)
        curves[f"{warmup_epochs:g} warm-up epochs"] = accuracies
        log(
            f"| {hvd.size()} | {warmup_epochs:g} | {seconds:.2f} "
            f"| {len(data.train.labels) / seconds:.0f} "
            f"| {accuracies.training[-1]:.4f} | {accuracies.validation[-1]:.4f} |"
        )

    files = [
        Path(options.output_dir, f"accuracy_{hvd.size()}.{suffix}") for suffix in options.formats
    ]
    rate = f"rate {options.lr:g} x {hvd.size()}"
    title = f"{course_common.ranks(hvd.size())}, batch {options.batch_size} each, {rate}"
    hvd.on_rank_zero(course_plot.plot)(curves, title, files)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this script."""
    add = parser.add_argument
    add("--warmup-epochs", type=float, nargs="+", default=[0, 3], help="one training for each")
    add("--output-dir", default=".", help="folder of the plot; created if needed")
    add("--formats", nargs="+", default=["pdf"], choices=("pdf", "png", "svg"))


def train(
    data: Digits, device: torch.device, warmup_epochs: float, options: argparse.Namespace
) -> tuple[course_plot.Accuracies, float]:
    """Train once, and return the accuracies and the mean seconds of an epoch.

    The first epoch, in which memory is allocated, counts only if it is the only one.
    """
    torch.manual_seed(options.seed)
    train_set, test_set = as_dataset(data.train), as_dataset(data.test)
    sampler = hvd.ShardSampler(train_set, options.batch_size)
    batches = DataLoader(train_set, batch_sampler=sampler)
    test_sampler = hvd.ShardSampler(test_set, batch_size=256, shuffle=False)
    test_batches = DataLoader(test_set, batch_sampler=test_sampler)

    model = make_model(*data.train.images.shape[1:]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    rate = hvd.warmup(options.lr, warmup_epochs)

    accuracies, seconds = course_plot.Accuracies([], []), []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        trained = train_epoch(model, optimizer, with_rates(batches, optimizer, rate, epoch), device)
        seconds.append(time.perf_counter() - start)
        accuracies.training.append(trained["accuracy"])
        accuracies.validation.append(evaluate(model, test_batches, device)["accuracy"])
    timed = seconds[1:] or seconds
    return accuracies, sum(timed) / len(timed)


def with_rates(
    batches: DataLoader, optimizer: torch.optim.Optimizer, rate: Any, epoch: int
) -> Iterator[Any]:
    """Yield the batches, and set the learning rate before each step."""
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch + step / len(batches))
        yield batch


if __name__ == "__main__":
    main()
