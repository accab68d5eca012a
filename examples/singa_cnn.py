"""Train the CNN of Apache SINGA's page on distributed training, in any of its five modes.

    hvdliterun -np 2 python singa_cnn.py --dist-option sparseTopK --spars 0.05
    python singa_cnn.py --spawn 2 --data-dir mnist

docs/tutorials/singa.md explains it.
"""

from __future__ import annotations

import argparse
import sys
import time

import digits
import failures

try:
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, interpolate

    import hvdlite.torch as hvd
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'hvdlite[torch]'`")

# SINGA's names, and hvdlite's presets of the same names.
MODES = ("fp32", "fp16", "partialUpdate", "sparseTopK", "sparseThreshold")
SIDE = 28  # pixels of the images that the network is made for


def main() -> None:
    """Train on the ranks of a launcher, or on processes that this one starts."""
    options = parse_options()
    if not options.spawn:
        train(options)
        return
    try:
        digits.load(options.data_dir)  # a mistake ends the script before processes start
    except digits.DataError as error:
        sys.exit(str(error))
    hvd.spawn(lambda number: train(options), options.spawn)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, and as ``compression`` SINGA's mode."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add("--dist-option", choices=MODES, default=MODES[0], help="how ranks exchange (%(default)s)")
    add(
        "--spars",
        type=float,
        default=0.05,
        help="sparseTopK: fraction to send; sparseThreshold: threshold (%(default)s)",
    )
    add("--epochs", type=int, default=10, help="(%(default)s)")
    add("--batch-size", type=int, default=64, help="images per rank and step (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the order of the images")
    add("--spawn", type=int, default=0, metavar="N", help="start N processes, without a launcher")
    options = parser.parse_args(arguments)
    for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0), ("spawn", 0)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')}: found {value}, expected {least} or more")
    try:
        options.compression = hvd.singa(options.dist_option, options.spars)
    except ValueError as error:
        parser.error(f"--spars: {error}")
    return options


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
        say(f"Starting Epoch {epoch}:")
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
        loss_sum, correct = add_over_ranks(loss_sum, correct)
        accuracy = correct / len(images)
        say(f"Training loss = {loss_sum:.6f}, training accuracy = {accuracy:.6f}")

        if options.dist_option == "partialUpdate":  # until here, weights differ between the ranks
            optimizer.average_weights()
        with torch.no_grad():
            found = sum(count_correct(model(test_images[b]), test_labels[b]) for b in test_batches)
        (found,) = add_over_ranks(found)
        accuracy, seconds = found / len(test_images), time.perf_counter() - start
        say(f"Evaluation accuracy = {accuracy:.6f}, Elapsed Time = {seconds:.6f}s")


def to_tensors(samples: digits.Samples, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of shape (samples, 1, 28, 28), smaller ones enlarged, and their labels."""
    images = torch.from_numpy(samples.images).unsqueeze(1).to(device)
    if images.shape[2:] != (SIDE, SIDE):
        images = interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True)
    return images, torch.from_numpy(samples.labels).to(device)


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


def add_over_ranks(*values: float) -> list[float]:
    """Return the sum of each value over all ranks."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum).tolist()


def say(line: str) -> None:
    """Print a line, on rank 0 only."""
    if hvd.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
