"""Measure the cost of comparing replicas: the checksums of a ResNet-50, beside one of its steps.

``python -m tests.benchmarks.replicas [--batch 32] [--rounds 3] [--threads N]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from hvdlite.gradients import describe_weights
from hvdlite.torch.tensors import to_array

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, stride


class _Bottleneck(nn.Module):
    """Three convolutions and a shortcut (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * channels
        self.body = nn.Sequential(
            *_convolution(channels_in, channels, 1, 1),
            nn.ReLU(),
            *_convolution(channels, channels, 3, stride),
            nn.ReLU(),
            *_convolution(channels, channels_out, 1, 1),
        )
        same = channels_in == channels_out and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(*_convolution(channels_in, channels_out, 1, stride))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet50() -> nn.Module:
    """Make a ResNet-50 for ImageNet, of 25.6 million parameters."""
    parts = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels_in = 64
    for channels, blocks, stride in _STAGES:
        for number in range(blocks):
            parts.append(_Bottleneck(channels_in, channels, stride if number == 0 else 1))
            channels_in = 4 * channels
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 1000)
    )


def _convolution(channels_in: int, channels: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


def compare(model: nn.Module, batch: int, side: int, rounds: int) -> tuple[float, float]:
    """Return the seconds that the checksums of a model take, and those of a step; the fastest.

    Args:
        model: of images.
        batch: images in a step.
        side: pixels of an image in each direction.
        rounds: of which the fastest counts.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(batch, 3, side, side), torch.zeros(batch, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def check() -> None:
        describe_weights((n, to_array(each.detach())) for n, each in model.named_parameters())

    step()
    return _fastest(check, rounds), _fastest(step, rounds)


def _fastest(call: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print both times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = resnet50()
    count = sum(parameter.numel() for parameter in model.parameters())
    check, step = compare(model, arguments.batch, 224, arguments.rounds)
    print(
        f"{count / 1e6:.1f} million parameters, {arguments.threads} threads: checksums "
        f"{check * 1e3:.1f} ms, a step at batch {arguments.batch} {step:.2f} s: "
        f"{100 * check / step:.2f} %"
    )


if __name__ == "__main__":
    main()
