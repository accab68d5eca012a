"""The workloads' models in PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from tests.benchmarks.workloads import (
    CLASSES,
    LAYER_WIDTH,
    LAYERS,
    MLP_WIDTHS,
    RESNET_GROUPS,
    WORKLOADS,
)


def build(name: str) -> nn.Module:
    """Make a model with the weights that it has on every rank.

    Args:
        name: of a workload.
    """
    torch.manual_seed(0)
    model = _BUILDERS[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # torch's own initialization lets signals die within 200 layers.
            nn.init.kaiming_normal_(parameter)
    return model


class _Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels_in, channels, 3, stride),
            nn.ReLU(),
            *_convolution(channels, channels, 3, 1),
        )
        same = channels_in == channels and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(*_convolution(channels_in, channels, 1, stride))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def _convolution(channels_in: int, channels: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


def _resnet() -> nn.Module:
    channels_in = RESNET_GROUPS[0][0]
    parts = [*_convolution(3, channels_in, 3, 1), nn.ReLU()]
    for channels, stride in RESNET_GROUPS:
        parts += [_Block(channels_in, channels, stride), _Block(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES)
    )


def _dense(widths: list[int]) -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _layers() -> nn.Module:
    return _dense([LAYER_WIDTH] * LAYERS + [CLASSES])


def _mlp() -> nn.Module:
    return _dense([*WORKLOADS["mlp"].sample, *MLP_WIDTHS, CLASSES])


_BUILDERS = {"layers": _layers, "resnet": _resnet, "mlp": _mlp}
