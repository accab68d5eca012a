"""Train LeNet on handwritten digits as MXNet's Gluon does, on several ranks and devices.

    python gluon_lenet.py
    hvdliterun -np 2 python gluon_lenet.py --data-dir mnist --loss sum
    python gluon_lenet.py --devices cuda:0 cuda:1

docs/tutorials/gluon.md explains it; `gluon_lenet_tensorflow.py` is its form for TensorFlow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import digits
import failures
import gluon_common

try:
    import torch
    from torch import nn
    from torch.func import functional_call
    from torch.nn.functional import cross_entropy

    import hvdlite.torch as hvd
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'hvdlite[torch]'`")

Replica = Callable[[torch.Tensor], torch.Tensor]


def train(options: argparse.Namespace) -> nn.Module:
    """Train, report accuracy and time after each epoch, and return the network."""
    hvd.init()
    devices = find_devices(options.devices)
    gluon_common.check_batch_size(hvd, options, len(devices))
    data = failures.load_data(hvd, options.data_dir)
    images, labels = to_tensors(data.train)
    test_images, test_labels = to_tensors(data.test)
    batches = hvd.ShardSampler(len(images), options.batch_size // hvd.size(), seed=options.seed)

    torch.manual_seed(options.seed)
    model = make_lenet().to(devices[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=gluon_common.WAYS[options.compression],
        op=hvd.Sum if options.loss == "sum" else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    metric = Accuracy()
    for epoch in range(options.epochs):
        metric.reset()
        start = time.perf_counter()
        steps = zip(batches, batches.sharding.global_batch_sizes, strict=True)
        for batch, global_batch_size in steps:
            optimizer.zero_grad()
            parts = split_and_load(images[batch], devices, even_split=False)
            answers = split_and_load(labels[batch], devices, even_split=False)
            replicas = replicate(model, devices)
            outputs = [replica(part) for replica, part in zip(replicas, parts, strict=True)]
            if options.loss == "sum":
                # op=Sum adds the ranks' gradients; the division by all images is left to do.
                loss = add_losses(outputs, answers, scale=1 / global_batch_size)
                loss.backward()
                optimizer.step()
            else:
                # The mean over this rank's images, which batch_size=n weights by their number.
                loss = add_losses(outputs, answers, scale=1 / len(batch))
                loss.backward()
                optimizer.step(batch_size=len(batch))
            metric.update(answers, outputs)
        seconds = time.perf_counter() - start
        training = metric.get()
        test = evaluate(model, devices[0], test_images, test_labels)
        gluon_common.report(hvd, epoch, training, test, seconds)
    return model


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add the option that only this form of the script has."""
    own = "of one rank, the same one twice too; default: one of its own"
    parser.add_argument("--devices", nargs="+", help=own)


def find_devices(names: Sequence[str] | None) -> list[torch.device]:
    """Return the devices of this rank; end the job with one line where one cannot be used."""
    own = hvd.pin_device()  # on a CPU, also the rank's share of the cores

    def use() -> list[torch.device]:
        try:
            return [torch.empty(0, device=name).device for name in names or [own]]
        except (RuntimeError, AssertionError) as error:  # the latter without CUDA
            line = str(error).partition("\n")[0]
            raise ValueError(f"--devices: {line}; expected some such as cpu or cuda:0") from error

    return failures.agree(hvd, use, ValueError)


def split_and_load(
    data: torch.Tensor, devices: Sequence[torch.device], even_split: bool = True
) -> list[torch.Tensor]:
    """Split a batch along its first axis, and copy each part to its device.

    Args:
        data: of shape (samples, ...).
        devices: one for each part.
        even_split: whether the parts must have the same size; False: they differ by one sample at
            most.

    Raises:
        ValueError: there are fewer samples than devices, or ``even_split`` is impossible.
    """
    if len(data) < len(devices):
        raise ValueError(f"a batch of {len(data)} cannot give each of {len(devices)} devices one")
    if even_split and len(data) % len(devices):
        raise ValueError(
            f"a batch of {len(data)} is not divisible by {len(devices)} devices; change its size, "
            "or pass even_split=False"
        )
    parts = torch.tensor_split(data, len(devices))
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]


def replicate(model: nn.Module, devices: Sequence[torch.device]) -> list[Replica]:
    """Return the model as a function on each device, with its weights of this moment.

    The copies are part of the graph. So one backward pass adds the gradients of all replicas on the
    device of the model, and only then the optimizer's hooks, which exchange the sums, are called.
    Changes of buffers, such as those of batch normalisation, stay on the copies.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def on(device: torch.device) -> Replica:
        copies = {name: tensor.to(device) for name, tensor in tensors.items()}
        return lambda data: functional_call(model, copies, (data,))

    return [on(device) for device in devices]


def add_losses(
    outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], scale: float
) -> torch.Tensor:
    """Return the sum of the losses of all images on all devices, times a factor."""
    sums = [
        cross_entropy(output, answers, reduction="sum")
        for output, answers in zip(outputs, labels, strict=True)
    ]
    return scale * sum(loss.to(sums[0].device) for loss in sums)


class Accuracy:
    """An accuracy that accumulates over batches, devices and, in `get`, ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self._correct: dict[torch.device, torch.Tensor] = {}
        self._count = 0

    def update(self, labels: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Count the images of one batch, given by device; no device is waited for."""
        for answers, output in zip(labels, outputs, strict=True):
            correct = (output.argmax(dim=1) == answers).sum()
            self._correct[answers.device] = self._correct.get(answers.device, 0) + correct
            self._count += len(answers)

    def get(self) -> float:
        """Return the accuracy over all images of all ranks; collective."""
        correct = sum(count.item() for count in self._correct.values())
        total = hvd.sum_metrics({"correct": correct, "count": self._count})
        return total["correct"] / total["count"]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    device: torch.device,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Return the accuracy on the test images, each counted once over all ranks."""
    metric = Accuracy()
    for batch in hvd.ShardSampler(len(images), 256, shuffle=False, allow_empty=True):
        metric.update([labels[batch].to(device)], [model(images[batch].to(device))])
    return metric.get()


def to_tensors(samples: digits.Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of shape (samples, 1, 28, 28), smaller ones enlarged, and their labels."""
    images = torch.from_numpy(digits.resize(samples.images, gluon_common.SIDE)).unsqueeze(1)
    return images, torch.from_numpy(samples.labels)


def make_lenet() -> nn.Module:
    """Return Gluon's network, of 60,170 weights, drawn as its ``init.Xavier()`` does."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5 * 5 * 16, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, digits.CLASSES),
    )
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    return model


if __name__ == "__main__":
    train(gluon_common.parse_options(__doc__, add_more=add_devices))
