"""Solve the course's homework with PyTorch: time and accuracy of MNIST on N processes, by warm-up.

    hvdliterun -np 4 python course_homework.py --data-dir mnist

It trains once for each number of `--warmup-epochs`, each time from the same initial weights, and
writes the training and the validation accuracy after each epoch to `accuracy_4.pdf`.
`course_homework_tensorflow.py` is the same with TensorFlow.
"""

from __future__ import annotations

import argparse
import time

import course_comparison
import torch
from course_mnist_torch import as_dataset, evaluate, make_model, train_epoch
from course_plot import Accuracies
from digits import Digits
from torch.utils.data import DataLoader

import hvdlite.torch as hvd


def main() -> None:
    """Train with and without warm-up, print a table and draw the curves."""
    options = course_comparison.parse_options(__doc__)
    hvd.init()
    course_comparison.compare(hvd, train, options)


def train(
    data: Digits, warmup_epochs: float, options: argparse.Namespace
) -> tuple[Accuracies, float]:
    """Train once, and return the accuracies and the mean seconds of an epoch."""
    device = hvd.pin_device()
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

    def use(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    accuracies, seconds = Accuracies([], []), []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        rated = course_comparison.with_rates(batches, rate, epoch, use)
        trained = train_epoch(model, optimizer, rated, device)
        seconds.append(time.perf_counter() - start)
        accuracies.training.append(trained["accuracy"])
        accuracies.validation.append(evaluate(model, test_batches, device)["accuracy"])
    return accuracies, course_comparison.mean_of_later(seconds)


if __name__ == "__main__":
    main()
