"""Train the CNN of Apache SINGA's page on distributed training, in any of its five modes.

    hvdliterun -np 2 python singa_cnn.py --dist-option sparseTopK --spars 0.05
    python singa_cnn.py --spawn 2 --data-dir mnist

docs/tutorials/singa.md explains it; `singa_cnn_tensorflow.py` is its form for TensorFlow.
"""

from __future__ import annotations

import argparse
import sys
import time

import digits
import failures
import singa_common
from singa_common import report_evaluation, report_training, say

try:
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    import hvdlite.torch as hvd
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'hvdlite[torch]'`")


def train(options: argparse.Namespace) -> None:
    """Train, and report each epoch as SINGA does."""
    hvd.init()
    device = hvd.pin_device()
    data = failures.load_data(hvd, options.data_dir)
    images, labels = to_tensors(data.train, device)
    test_images, test_labels = to_tensors(data.test, device)
    batches = hvd.ShardSampler(len(images), options.batch_size, seed=options.seed)
    test_batches = hvd.ShardSampler(len(test_images), 256, shuffle=False)

    torch.manual_seed(options.seed)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=options.compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(options.epochs):
        start = time.perf_counter()
        say(hvd, f"Starting Epoch {epoch}:")
        loss_sum, correct = 0.0, 0
        # The weight is 1, except where a remainder gives one rank an image more than another.
        for batch, weight in zip(batches, batches.sharding.weights, strict=True):
            optimizer.zero_grad()
            output = model(images[batch])
            loss = cross_entropy(output, labels[batch])
            (weight * loss).backward()
            optimizer.step()
            loss_sum += loss.item()
            correct += count_correct(output, labels[batch])
        report_training(hvd, loss_sum, correct, len(images))

        if options.dist_option == "partialUpdate":  # until here, weights differ between the ranks
            optimizer.average_weights()
        with torch.no_grad():
            found = sum(count_correct(model(test_images[b]), test_labels[b]) for b in test_batches)
        report_evaluation(hvd, found, len(test_images), time.perf_counter() - start)


def to_tensors(samples: digits.Samples, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of shape (samples, 1, 28, 28), smaller ones enlarged, and their labels."""
    images = torch.from_numpy(digits.resize(samples.images, singa_common.SIDE)).unsqueeze(1)
    return images.to(device), torch.from_numpy(samples.labels).to(device)


def make_model() -> nn.Module:
    """Return the network, of 431,080 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 50, 500),
        nn.ReLU(),
        nn.Linear(500, digits.CLASSES),
    )


def count_correct(output: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many images got the highest score for their label."""
    return int((output.argmax(dim=1) == labels).sum())


if __name__ == "__main__":
    singa_common.start(train, singa_common.parse_options(__doc__))
