"""A rank sends the same bytes for the same gradients, whatever its framework."""

from __future__ import annotations

import hashlib
from unittest import mock

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.transport import registry
from hvdlite.transport.counting import CountingTransport
from tests.compression.strategies import ONE_OF_EACH
from tests.harness import ranks

pytest.importorskip("torch")
pytest.importorskip("tensorflow")

SHAPES = {"kernel": (40, 30), "bias": (30,), "scale": ()}
STEPS = 3


class Recording(CountingTransport):
    """A transport that records the arguments of the collectives that carry gradients."""

    def __init__(self, inner):
        super().__init__(inner)
        self.record = []

    def allreduce(self, send, result, op, scaling):
        self._note("allreduce", [send])
        super().allreduce(send, result, op, scaling)

    def alltoall(self, pieces, result):
        self._note("alltoall", pieces)
        super().alltoall(pieces, result)

    def allgather(self, piece, result):
        self._note("allgather", [piece])
        super().allgather(piece, result)

    def _note(self, collective, arrays):
        content = b"".join(array.tobytes() for array in arrays)
        self.record.append((collective, len(content), hashlib.sha256(content).hexdigest()))


class World:
    """A new world, whose gradient lane is recorded."""

    def __enter__(self):
        made = []
        connect = registry.connect

        def recording(*args):
            made.append(Recording(connect(*args)))
            return made[-1]

        hvd.shutdown()
        with mock.patch.object(registry, "connect", recording):
            hvd.init()
        (lane,) = (each for each in made if each.lane == "gradients")
        return lane.record

    def __exit__(self, *error):
        hvd.shutdown()


def gradient(name, step):
    number = list(SHAPES).index(name)
    draw = np.random.default_rng([step, hvd.rank(), number])
    return np.asarray(draw.standard_normal(SHAPES[name]), np.float32)


def by_pytorch(strategy):
    import torch

    import hvdlite.torch as adapter

    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = adapter.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0), parameters.items(), strategy
    )
    averages = []
    for step in range(STEPS):
        optimizer.zero_grad()
        # In reverse order, which is that of the plan.
        for name in reversed(SHAPES):
            (parameters[name] * torch.from_numpy(gradient(name, step))).sum().backward()
        optimizer.synchronize()
        averages += [parameter.grad.numpy().copy() for parameter in parameters.values()]
        with optimizer.skip_synchronize():
            optimizer.step()
    return averages


def by_tensorflow(strategy):
    import tensorflow as tf

    import hvdlite.tensorflow as adapter

    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]

    @tf.function
    def averaged(given):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, given, strict=True)])
        tape = adapter.DistributedGradientTape(tape, compression=strategy)
        return tape.gradient(loss, variables)

    averages = []
    for step in range(STEPS):
        averages += [g.numpy() for g in averaged([gradient(name, step) for name in SHAPES])]
    return averages


@pytest.mark.slow
@ranks(2)
def test_pytorch_and_tensorflow_send_the_same():
    for strategy in ONE_OF_EACH:
        with World() as of_pytorch:
            one = by_pytorch(strategy)
        with World() as of_tensorflow:
            other = by_tensorflow(strategy)
        assert of_pytorch == of_tensorflow, strategy
        assert len(of_pytorch) >= STEPS
        for first, second in zip(one, other, strict=True):
            assert first.tobytes() == second.tobytes(), strategy
