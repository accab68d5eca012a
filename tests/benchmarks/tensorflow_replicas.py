"""A training step in TensorFlow, once for each way to exchange gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import hvdlite.tensorflow as hvd
from tests.benchmarks import libraries, tensorflow_models
from tests.benchmarks.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS

Wrapping = Callable[[tf.GradientTape], tf.GradientTape]


class Replica:
    """A copy of a workload's model with an optimizer of its own.

    Args:
        name: of the contender.
        workload: the name of the workload.
        batch: samples per step.
        seed: of this rank's data.
        wrap: makes of a tape one that exchanges.
    """

    def __init__(self, name: str, workload: str, batch: int, seed: int, wrap: Wrapping) -> None:
        self.name = name
        samples, labels = WORKLOADS[workload].data(batch, seed)
        self._batch = tf.constant(samples), tf.constant(labels)
        self._model = tensorflow_models.build(workload)
        self._optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        self._optimizer.build(self._model.trainable_variables)
        self._step = tf.function(self._trained_with(wrap))
        self._loss = 0.0

    def _trained_with(self, wrap: Wrapping) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        variables = self._model.trainable_variables

        def step(samples: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                outputs = self._model(samples, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
                loss = tf.reduce_mean(losses)
            gradients = wrap(tape).gradient(loss, variables)
            self._optimizer.apply(gradients, variables)
            return loss

        return step

    def step(self) -> None:
        """Train on the batch once."""
        self._loss = float(self._step(*self._batch))

    def loss(self) -> float:
        """Return the last step's loss."""
        return self._loss

    def gradients(self) -> np.ndarray[Any, Any]:
        """Return the first step's gradients, flat: its momenta are -LEARNING_RATE times them."""
        parts = [momentum.numpy().reshape(-1) for momentum in self._optimizer.momentums]
        return np.concatenate(parts) / np.float32(-LEARNING_RATE)


@contextlib.contextmanager
def replicas(comm: MPI.Comm, workload: str, batch: int) -> Iterator[list[Replica]]:
    """Return a replica for each contender: alone, hvdlite, and Horovod where there is one.

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
    }
    other = libraries.horovod("tensorflow")
    if other is not None:
        ways["horovod"] = other.DistributedGradientTape
    yield [Replica(name, workload, batch, comm.rank, wrap) for name, wrap in ways.items()]
    hvd.shutdown()
