"""ResNet-34 (He et al. 2015, arXiv:1512.03385) in Keras, whose width can be chosen."""

from __future__ import annotations

from typing import Any

from keras import Input, Model, layers

_BLOCKS = (3, 4, 6, 3)


def resnet34(size: int, classes: int = 1000, width: int = 64) -> Model:
    """Return the network, for images of shape (N, size, size, 3); its output is logits.

    Args:
        size: pixels of height and width.
        classes: of the output.
        width: channels of the first convolution; 64 in the paper.
    """
    images = Input((size, size, 3))
    x = _convolution(images, width, 7, stride=2)
    x = layers.ReLU()(x)
    x = layers.MaxPool2D(pool_size=3, strides=2, padding="same")(x)
    for stage, blocks in enumerate(_BLOCKS):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(x, width * 2**stage, stride)
    x = layers.GlobalAveragePooling2D()(x)
    return Model(images, layers.Dense(classes)(x), name="resnet34")


def _block(x: Any, channels: int, stride: int) -> Any:
    """Return two convolutions beside a shortcut."""
    same = stride == 1 and x.shape[-1] == channels
    shortcut = x if same else _convolution(x, channels, 1, stride)
    x = _convolution(x, channels, 3, stride)
    x = layers.ReLU()(x)
    # Zeros, so that each block begins as its shortcut (Goyal et al. 2017, arXiv:1706.02677).
    x = _convolution(x, channels, 3, gamma="zeros")
    return layers.ReLU()(x + shortcut)


def _convolution(x: Any, channels: int, size: int, stride: int = 1, gamma: str = "ones") -> Any:
    x = layers.Conv2D(
        channels, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(x)
    return layers.BatchNormalization(gamma_initializer=gamma)(x)
