"""Variables of TensorFlow that a tape trains, eagerly and in a graph, and that can part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.world import world
from tests.campaigns.divergence import Parting

KINDS = ("eager", "graph")


class Victim:
    """Two variables; see `tests.campaigns.divergence.Victim`."""

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        draw = np.random.default_rng(0).normal
        self.kernel = tf.Variable(draw(size=(4, 3)), dtype=tf.float32, name="kernel")
        self.bias = tf.Variable(draw(size=3), dtype=tf.float32, name="bias")
        self._options = options
        self._call = tf.function(self._train) if kind == "graph" else self._train

    def _train(self, x: tf.Tensor, samples: tf.Tensor | None) -> None:
        variables = [self.kernel, self.bias]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.kernel + self.bias) ** 2)
        tape = hvd.DistributedGradientTape(tape, **self._options)
        weight = {} if samples is None else {"batch_size": samples}
        for variable, gradient in zip(
            variables, tape.gradient(loss, variables, **weight), strict=True
        ):
            variable.assign_sub(0.05 * gradient)

    def step(self, number: int, samples: int | None = None) -> None:
        """Make a step."""
        generator = np.random.default_rng((number, world.rank()))
        x = tf.constant(generator.normal(size=(samples or 4, 4)), tf.float32)
        self._call(x, None if samples is None else tf.constant(samples, tf.int64))

    def broadcast(self, root: int) -> None:
        """Give all ranks the variables of one."""
        hvd.broadcast_variables([self.kernel, self.bias], root)

    def partings(self) -> dict[str, Parting]:
        """Return a variable, and both."""
        return {
            "a weight": Parting(lambda: self.bias.assign_add([0.0, 1.0, 0.0]), "the weight 'bias'"),
            "weights that are loaded": Parting(
                lambda: self.kernel.assign(0.5 * self.kernel), "the weight 'kernel'"
            ),
        }


def make(kind: str, options: Mapping[str, Any], is_named: bool = False) -> Victim:
    """Return a victim."""
    return Victim(kind, options)
