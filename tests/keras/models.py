"""Models, data and helpers for the tests of Keras 3 on any framework.

Expected weights come from Keras itself: the same training without hvdlite, in one process, on the
union of the ranks' batches.
"""

import keras
import numpy as np

import hvdlite.keras as hvd
from tests.keras.measures import close, exchanges, same_on_all_ranks

BATCH, STEPS = 4, 6
TORCH = keras.backend.backend() == "torch"
EAGER = not TORCH  # As PyTorch's steps are in any case.


def data(scale=1.0):
    """Return inputs and targets of all ranks for STEPS steps; row i belongs to rank i % size."""
    draw = np.random.default_rng(0).normal
    rows = BATCH * STEPS * hvd.size()
    x = draw(size=(rows, 5)).astype(np.float32)
    return x, (scale * np.sin(x.sum(axis=1, keepdims=True))).astype(np.float32)


def own(array):
    return array[hvd.rank() :: hvd.size()]


def make_model(seed=1):
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh", name="first"),
            keras.layers.Dense(1, name="second"),
        ]
    )
    draw = np.random.default_rng(seed).normal
    model.set_weights([draw(size=weight.shape) / 2 for weight in model.get_weights()])
    return model


def fit(model, optimizer, x, y, batch, graph=False, jit_compile=False, **options):
    """Train; `graph`: TensorFlow traces the step, which takes longer than all steps do without."""
    eager = EAGER and not graph and not jit_compile
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile, run_eagerly=eager)
    options = {"epochs": 1, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, batch_size=batch, **options)


def reference(optimizer, **options):
    """Return the final weights of one process that trains on the batches of all ranks."""
    model = make_model()
    fit(model, optimizer, *data(), BATCH * hvd.size(), **options)
    return model.get_weights()


def check_fit(optimizer, expected, steps=STEPS, **options):
    """Train with fit; check the weights, their equality on all ranks, and one exchange per step."""
    model = make_model()
    with exchanges() as count:
        fit(model, optimizer, *map(own, data()), BATCH, **options)
    assert len(count) == steps, count
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), expected)
    assert not close(model.get_weights(), make_model().get_weights(), 1e-3)
    return model


def gradients_of(model, x, y):
    """Return this rank's gradients of the mean squared error."""
    if TORCH:
        model.zero_grad()
        loss = keras.ops.mean(keras.ops.square(model(x) - keras.ops.convert_to_tensor(y)))
        loss.backward()
        return [variable.value.grad for variable in model.trainable_variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])
