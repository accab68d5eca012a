"""The workloads' models in Keras."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from tests.benchmarks.workloads import (
    CLASSES,
    LAYER_WIDTH,
    LAYERS,
    MLP_WIDTHS,
    RESNET_GROUPS,
    WORKLOADS,
)


def build(name: str) -> keras.Model:
    """Make a model with the weights that it has on every rank.

    Args:
        name: of a workload.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input(WORKLOADS[name].sample)
    return keras.Model(inputs, _BUILDERS[name](inputs))


def _resnet(images: Any) -> Any:
    """Return a ResNet (He et al. 2015, arXiv:1512.03385), as for CIFAR: no pooling at the start."""
    x = layers.ReLU()(_convolution(images, RESNET_GROUPS[0][0], 3, 1))
    for channels, stride in RESNET_GROUPS:
        x = _block(_block(x, channels, stride), channels, 1)
    return layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))


def _block(x: Any, channels: int, stride: int) -> Any:
    body = layers.ReLU()(_convolution(x, channels, 3, stride))
    body = _convolution(body, channels, 3, 1)
    same = x.shape[-1] == channels and stride == 1
    shortcut = x if same else _convolution(x, channels, 1, stride)
    return layers.ReLU()(layers.Add()([body, shortcut]))


def _convolution(x: Any, channels: int, kernel: int, stride: int) -> Any:
    convolution = layers.Conv2D(
        channels,
        kernel,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )
    return layers.BatchNormalization()(convolution(x))


def _dense(x: Any, widths: list[int]) -> Any:
    for width in widths:
        x = layers.Dense(width, activation="relu", kernel_initializer="he_normal")(x)
    return layers.Dense(CLASSES, kernel_initializer="he_normal")(x)


def _layers(x: Any) -> Any:
    return _dense(x, [LAYER_WIDTH] * (LAYERS - 1))


def _mlp(x: Any) -> Any:
    return _dense(x, list(MLP_WIDTHS))


_BUILDERS = {"layers": _layers, "resnet": _resnet, "mlp": _mlp}
