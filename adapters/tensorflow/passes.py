"""Gradients of several backward passes that add up before a step, in TensorFlow's variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.tensorflow.graphs import refuse_session

_Pairs = list[tuple[Any, Any]]


class PassCounter:
    """Adds up gradients, and lets every so many-th pass make a step.

    Args:
        passes: how many make a step.
        average: whether a step gets their average, and not their sum.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._divisor = passes if average else 1
        self._sums: list[tf.Variable] = []
        self._pending: set[int] = set()

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables for the gradients of these; outside of any graph.

        Raises:
            NotImplementedError: in a graph for a ``tf.compat.v1.Session``.
        """
        refuse_session("backward_passes_per_step")
        if self._sums:
            return
        with tf.init_scope():
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._sums = [
                tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for variable in variables
            ]

    def run(
        self, pairs: _Pairs, step: Callable[[_Pairs], Any], skip: Callable[[], Any]
    ) -> tf.Tensor:
        """Add gradients up; then step on what has come together, or skip the step.

        Args:
            pairs: of gradients, which may be None, and variables; always the same variables.
            step: takes such pairs.
            skip: is called in the place of ``step``.

        Returns:
            Whether there was a step.
        """
        eager = tf.executing_eagerly()
        if not eager:
            self._pending.clear()
        for number, (gradient, _) in enumerate(pairs):
            if gradient is not None:
                self._pending.add(number)
                self._sums[number].assign_add(tf.convert_to_tensor(gradient))
        complete = self._count.assign_add(1) % self._passes == 0

        def act() -> tf.Tensor:
            step([(self._take(number), variable) for number, (_, variable) in enumerate(pairs)])
            return tf.constant(True)

        def wait() -> tf.Tensor:
            skip()
            return tf.constant(False)

        if not eager:
            return tf.cond(complete, act, wait)
        if not complete:
            return wait()
        stepped = act()
        self._pending.clear()
        return stepped

    def _take(self, number: int) -> tf.Tensor | None:
        if number not in self._pending:
            return None
        total = self._sums[number]
        # Computed before the variable is zeros again.
        result = tf.identity(total) / tf.cast(self._divisor, total.dtype)
        total.assign(tf.zeros_like(total))
        return result
