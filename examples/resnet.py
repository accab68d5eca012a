"""ResNet-34 and ResNet-50 (He et al. 2015, arXiv:1512.03385), whose width can be chosen.

The stride of ResNet-50's blocks is in their 3x3 convolution, as in most later implementations.
"""

from __future__ import annotations

import torch
from torch import nn

_BLOCKS = (3, 4, 6, 3)


class Block(nn.Module):
    """Convolutions beside a shortcut.

    Args:
        channels: of the input.
        inner: channels of the 3x3 convolutions.
        stride: of the first 3x3 convolution.
    """

    expansion: int  # how many times more channels the output has than the inside

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = inner * self.expansion
        self.layers = nn.Sequential(*self.convolutions(channels, inner, outer, stride))
        # So that each block begins as its shortcut (Goyal et al. 2017, arXiv:1706.02677).
        nn.init.zeros_(self.layers[-1].weight)
        same = stride == 1 and channels == outer
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(channels, outer, 1, stride))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.layers(images) + self.shortcut(images))


class BasicBlock(Block):
    """Two convolutions (3x3, 3x3) beside a shortcut."""

    expansion = 1

    @staticmethod
    def convolutions(channels: int, inner: int, outer: int, stride: int) -> list[nn.Module]:
        """Return the layers beside the shortcut."""
        return [
            *_convolution(channels, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, outer, 3),
        ]


class Bottleneck(Block):
    """Three convolutions (1x1, 3x3, 1x1) beside a shortcut."""

    expansion = 4

    @staticmethod
    def convolutions(channels: int, inner: int, outer: int, stride: int) -> list[nn.Module]:
        """Return the layers beside the shortcut."""
        return [
            *_convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, outer, 1),
        ]


def resnet34(classes: int = 1000, width: int = 64) -> nn.Module:
    """Return the network of 34 layers, as `resnet50`."""
    return _resnet(BasicBlock, classes, width)


def resnet50(classes: int = 1000, width: int = 64) -> nn.Module:
    """Return the network of 50 layers, for images of shape (N, 3, height, width).

    Args:
        classes: of the output.
        width: channels of the first convolution; 64 in the paper.
    """
    return _resnet(Bottleneck, classes, width)


def _resnet(kind: type[Block], classes: int, width: int) -> nn.Module:
    layers = [
        *_convolution(3, width, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    ]
    channels = width
    for stage, blocks in enumerate(_BLOCKS):
        inner = width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(kind(channels, inner, stride))
            channels = inner * kind.expansion
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(out)
