"""ResNet-50 (He et al. 2015, arXiv:1512.03385), whose width can be chosen.

The stride of a block is in its 3x3 convolution, as in most later implementations.
"""

from __future__ import annotations

import torch
from torch import nn

_EXPANSION = 4  # how many times more channels a block's output has than its inside
_BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """Three convolutions (1x1, 3x3, 1x1) beside a shortcut.

    Args:
        channels: of the input.
        inner: channels of the 3x3 convolution.
        stride: of the 3x3 convolution.
    """

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = inner * _EXPANSION
        self.layers = nn.Sequential(
            *_convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, outer, 1),
        )
        # So that each block begins as its shortcut (Goyal et al. 2017, arXiv:1706.02677).
        nn.init.zeros_(self.layers[-1].weight)
        same = stride == 1 and channels == outer
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(channels, outer, 1, stride))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return torch.relu(self.layers(images) + self.shortcut(images))


def resnet50(classes: int = 1000, width: int = 64) -> nn.Module:
    """Return the network, for images of shape (N, 3, height, width).

    Args:
        classes: of the output.
        width: channels of the first convolution; 64 in the paper.
    """
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
            layers.append(Bottleneck(channels, inner, stride))
            channels = inner * _EXPANSION
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(out)
