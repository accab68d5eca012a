import hashlib

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import each_mode, in_mode

STEPS, SAMPLES = 20, 24


def make_model():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)]
    )
    draw = np.random.default_rng(0).normal
    model.set_weights([draw(size=weight.shape) / 2 for weight in model.get_weights()])
    return model


def flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def train(model, mode, distributed):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        if distributed:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    step = in_mode(mode, step)
    share = SAMPLES // hvd.size() if distributed else SAMPLES
    start = hvd.rank() * share if distributed else 0
    draw = np.random.default_rng(1).normal
    for _ in range(STEPS):
        x, y = draw(size=(SAMPLES, 6)), draw(size=(SAMPLES, 2))
        step(
            tf.constant(x[start : start + share], tf.float32),
            tf.constant(y[start : start + share], tf.float32),
        )
    return flat(model)


@ranks(1, 2, 3)
@each_mode
def test_twenty_steps_equal_one_process_on_the_whole_batch(mode):
    hvd.init()
    expected = train(make_model(), "function", distributed=False).astype(np.float64)
    model = make_model()
    if hvd.rank():
        model.set_weights([0 * weight for weight in model.get_weights()])
    hvd.broadcast_variables(model.variables, root_rank=0)
    found = train(model, mode, distributed=True)
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
    digest = hashlib.sha256(found.tobytes()).hexdigest()
    assert len(set(hvd.allgather_object(digest))) == 1
    assert np.linalg.norm(found - flat(make_model())) > 1e-2 * np.linalg.norm(expected)
