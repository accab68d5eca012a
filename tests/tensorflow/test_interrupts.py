"""Test exchanges of gradients that an exception of a signal handler interrupts."""

from __future__ import annotations

import signal

import pytest
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.world import world
from tests.harness import ranks


class Stop(ValueError):  # noqa: N818
    """The exception of a user's signal handler; hvdlite translates its own ValueErrors only."""


@ranks(2)
def test_a_tape_after_an_interrupted_one():
    hvd.init()
    rank, comm = hvd.rank(), world.current().comm
    variables = [tf.Variable(tf.zeros(3)) for _ in range(3)]

    def gradients(value):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = sum((k + 1) * value * tf.reduce_sum(each) for k, each in enumerate(variables))
        return [each.numpy().tolist() for each in tape.gradient(loss, variables)]

    def stop(*_):
        raise Stop("save and go")

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        for step in range(1, 6):
            expected = [[(k + 1) * 1.5 * step] * 3 for k in range(3)]
            if step % 2 == 0 and rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(Stop, match="save and go") as caught:
                    gradients(step)
                assert caught.type is Stop
                comm.bcast(None)
                assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == 2
                continue
            if step % 2 == 0:
                comm.bcast(None)
            assert gradients(step * (rank + 1.0) if step % 2 else 2 * step) == expected
            if step % 2 == 0:
                assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == 2
    finally:
        signal.signal(signal.SIGALRM, previous)
