"""Models, data and helpers for the tests of any Keras on any framework.

Expected weights come from Keras itself: the same training without hvdlite, in one process, on the
union of the ranks' batches.
"""

import numpy as np

from hvdlite.keras._backends import uses_legacy_keras as LEGACY  # noqa: N812
from tests.keras import close, exchanges, same_on_all_ranks

if LEGACY:
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    keras = tf.keras
    KINDS = [keras.optimizers.SGD, keras.optimizers.legacy.SGD]
    LossScaling = keras.mixed_precision.LossScaleOptimizer
else:
    import keras

    import hvdlite.keras as hvd

    KINDS = [keras.optimizers.SGD]
    LossScaling = keras.optimizers.LossScaleOptimizer

BATCH, STEPS = 4, 6
TORCH = not LEGACY and keras.backend.backend() == "torch"
EAGER = not TORCH  # As PyTorch's steps are in any case.


def data(scale=1.0):
    """Return inputs and targets of all ranks for STEPS steps; row i belongs to rank i % size."""
    draw = np.random.default_rng(0).normal
    rows = BATCH * STEPS * hvd.size()
    x = draw(size=(rows, 5)).astype(np.float32)
    return x, (scale * np.sin(x.sum(axis=1, keepdims=True))).astype(np.float32)


def bad_data(value):
    """Return such data with a target of the last rank's third batch that is no finite number."""
    x, y = data()
    y[2 * BATCH * hvd.size() + hvd.size() - 1] = value
    return x, y


def data_without(*steps):
    """Return data of all ranks without those of some steps."""
    return [
        np.delete(each.reshape(STEPS, -1, each.shape[1]), steps, axis=0).reshape(-1, each.shape[1])
        for each in data()
    ]


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


def reference(optimizer, rows=None, passes=1):
    """Return the final weights of one process that trains on the batches of all ranks.

    Args:
        rows: Inputs and targets; None: `data`.
        passes: Batches of each rank in a step.
    """
    model = make_model()
    fit(model, optimizer, *(rows or data()), passes * BATCH * hvd.size())
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


def tensor(array):
    if LEGACY:
        return tf.convert_to_tensor(array)
    return keras.ops.convert_to_tensor(array)


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
    return tape.gradient(loss, model.trainable_variables)


def apply(optimizer, gradients, variables, **options):
    """Make a step, of Keras 3 by the call that takes the batch size around loss scaling, too."""
    if LEGACY:
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)), **options)
    else:
        optimizer.apply(gradients, variables, **options)


def trained_on_unions(optimizer, sizes_of_steps):
    """Return the final weights of one process that takes each step on the rows of all ranks."""
    model, done = make_model(), 0
    x, y = data()
    model.compile(optimizer, "mse", run_eagerly=EAGER, jit_compile=False)
    for sizes in sizes_of_steps:
        model.train_on_batch(x[done : done + sum(sizes)], y[done : done + sum(sizes)])
        done += sum(sizes)
    return model.get_weights()


def rows_of_this_rank(sizes_of_steps):
    x, y = data()
    done = 0
    for sizes in sizes_of_steps:
        start = done + sum(sizes[: hvd.rank()])
        rows = slice(start, start + sizes[hvd.rank()])
        yield tensor(x[rows]), tensor(y[rows])
        done += sum(sizes)


class Spy(keras.callbacks.Callback):
    """A callback that records rates, logs, and the ranks' agreement after every batch."""

    def __init__(self):
        super().__init__()
        self.same, self.rates, self.logs = [], [], []

    def on_train_begin(self, logs=None):
        self.same.append(same_on_all_ranks(self.model.get_weights()))

    def on_train_batch_end(self, batch, logs=None):
        self.same.append(same_on_all_ranks(self.model.get_weights()))
        self.rates.append(hvd.broadcast(self.model.optimizer.learning_rate, 0).item())

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))
