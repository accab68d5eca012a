"""TensorFlow's part of ``hvdlite bench``: its contenders, and the models that they train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from mpi4py import MPI

import hvdlite.tensorflow as hvd
from hvdlite.tools.bench.workloads import (
    CLASSES,
    LEARNING_RATE,
    MOMENTUM,
    RESNET_GROUPS,
    WORKLOADS,
)

Wrapping = Callable[[tf.GradientTape], Any]


class Replica:
    """A copy of a workload's model with an optimizer, whose tapes a contender wraps."""

    def __init__(self, name: str, workload: str, batch: int, seed: int, wrap: Wrapping) -> None:
        self.name = name
        samples, labels = WORKLOADS[workload].data(batch, seed)
        self._batch = tf.constant(samples), tf.constant(labels)
        self._model = build(workload)
        self._optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        self._optimizer.build(self._model.trainable_variables)
        self._wrap = wrap

    def step(self) -> None:
        """Train on the batch once."""
        self.loss = float(self._step(*self._batch))

    @tf.function
    def _step(self, samples: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self._model(samples, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            loss = tf.reduce_mean(losses)
        gradients = self._wrap(tape).gradient(loss, variables)
        self._optimizer.apply(gradients, variables)
        return loss

    def gradients(self) -> np.ndarray[Any, Any]:
        """Return the first step's gradients, flat: its momenta are -LEARNING_RATE times them."""
        parts = [momentum.numpy().reshape(-1) for momentum in self._optimizer.momentums]
        return np.concatenate(parts) / np.float32(-LEARNING_RATE)


@contextlib.contextmanager
def replicas(comm: MPI.Comm, names: Collection[str], workload: str) -> Iterator[list[Replica]]:
    """Provide a replica for each contender.

    Operations compute with one thread. There are two that run them, for every contender, as
    ``hvd.pin_device()`` sets it on one core: an exchange waits in one, and the backward pass
    should go on meanwhile.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init(comm)
    ways: dict[str, Wrapping] = {
        "alone": lambda tape: tape,
        "hvdlite": hvd.DistributedGradientTape,
        "mpi": lambda tape: _averaging(comm, tape),
    }
    chosen = [name for name in ways if name in names]
    batch = WORKLOADS[workload].batch
    yield [Replica(name, workload, batch, comm.rank, ways[name]) for name in chosen]
    hvd.shutdown()


def _averaging(comm: MPI.Comm, tape: tf.GradientTape) -> Any:
    """Average the gradients after the backward pass, one by one, by plain MPI."""

    def average(*gradients: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        averages = [each / np.float32(comm.size) for each in gradients]
        for each in averages:
            comm.Allreduce(MPI.IN_PLACE, each)
        return averages

    def gradient(target: tf.Tensor, sources: Sequence[Any]) -> Sequence[tf.Tensor]:
        gradients = tape.gradient(target, sources)
        averages = tf.numpy_function(average, gradients, [each.dtype for each in gradients])
        pairs = zip(averages, sources, strict=True)
        return [tf.ensure_shape(average, source.shape) for average, source in pairs]

    return SimpleNamespace(gradient=gradient)


# Models


def build(name: str) -> keras.Model:
    """Make a workload's model with the weights that it has on every rank."""
    keras.utils.set_random_seed(0)
    chosen = WORKLOADS[name]
    inputs = keras.Input(chosen.sample)
    outputs = _dense(inputs, chosen.widths) if chosen.widths else _resnet(inputs)
    return keras.Model(inputs, outputs)


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


def _dense(x: Any, widths: Sequence[int]) -> Any:
    for width in widths:
        x = layers.Dense(width, activation="relu", kernel_initializer="he_normal")(x)
    return layers.Dense(CLASSES, kernel_initializer="he_normal")(x)
