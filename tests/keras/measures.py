"""Helpers that count exchanges and compare ranks."""

import contextlib
import logging

import numpy as np
import pytest

import hvdlite
from hvdlite import collectives, runtime


@contextlib.contextmanager
def exchanges():
    """Return a list that gets the name of every operation on the gradient lane."""
    lane = runtime.engine().gradients
    count, submit, run = [], lane.submit, lane.run

    def counted(original):
        def wrapper(operation, *args, **kwargs):
            count.append(operation.name)
            return original(operation, *args, **kwargs)

        return wrapper

    lane.submit, lane.run = counted(submit), counted(run)
    try:
        yield count
    finally:
        lane.submit, lane.run = submit, run


@contextlib.contextmanager
def not_finite(reaction):
    """Start a world with a value of HVDLITE_NOT_FINITE; return a list of the steps left out."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hvdlite").addHandler(handler)
    hvdlite.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDLITE_NOT_FINITE", reaction)
        try:
            hvdlite.init()
            yield told
        finally:
            hvdlite.shutdown()
            logging.getLogger("hvdlite").removeHandler(handler)
    told[:] = [text for text in told if text.startswith("this step is left out on all ranks")]


def flat(weights):
    return np.concatenate([np.asarray(weight, np.float64).ravel() for weight in weights])


def same_on_all_ranks(weights):
    """Return whether the weights are bitwise the same on all ranks."""
    content = b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)
    return len(set(collectives.allgather_object(content))) == 1


def close(found, expected, tolerance=1e-5):
    found, expected = flat(found), flat(expected)
    return np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def check_replicas(hvd, keras, kinds, make_model, fit, x, y, batch):
    """Check that replicas that differ are refused, unless they may differ.

    Args:
        hvd: The adapter.
        keras: The Keras that it is for.
        kinds: Classes of optimizers that take a learning rate.
        make_model: Returns a model for a seed.
        fit: Trains a model with an optimizer, ``x``, ``y``, ``batch`` and callbacks.
        x: This rank's inputs.
        y: Their targets.
        batch: Samples in a batch.
    """
    rank = hvd.rank()

    def train(model, optimizer, callbacks=(), **options):
        fit(model, hvd.DistributedOptimizer(optimizer, **options), x, y, batch, callbacks=callbacks)
        return model.get_weights()

    def refused(model, optimizer):
        with pytest.raises(hvd.MismatchError) as caught:
            train(model, optimizer)
        assert "HVDLITE_CHECK_RANKS=warn" in str(caught.value)
        return str(caught.value)

    for kind in kinds:
        message = refused(make_model(seed=rank), kind(0.1))
        assert "first/kernel" in message or "kernel' is " in message
        assert "on rank 0, " in message
        assert "4 of 4 weights differ" in message
        assert "BroadcastGlobalVariablesCallback(0)" in message
        message = refused(make_model(), kind(0.25 + 0.25 * (rank == 1)))
        assert "the optimizer's learning_rate is 0.25 on rank" in message
        assert "0.5 on rank 1; make the same optimizer" in message
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5 + (rank == 1), 0.9)
        assert "'decay_steps': 6" in refused(make_model(), kind(decay))
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        assert same_on_all_ranks(train(make_model(seed=rank), kind(0.1), [broadcast]))
        train(make_model(seed=rank), kind(0.1), schedule=hvd.Schedule.LocalSGD(every=2))
    # Variables built in the first batch are broadcast after it.
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    assert same_on_all_ranks(train(model, kinds[0](0.1), [broadcast]))


def check_several_steps(keras, hvd, make_optimizer, make_model, x, y):
    """Check that ranks compare replicas only after the broadcast, with several steps in one call.

    Args:
        keras: The Keras in use.
        hvd: Its adapter.
        make_optimizer: Returns an optimizer, with a rate of 0.02 on rank 1.
        make_model: Returns a built model for a seed.
        x: This rank's inputs.
        y: Their targets.
    """
    batch = len(x) // 6

    def train(model, callbacks):
        optimizer = hvd.DistributedOptimizer(make_optimizer())
        model.compile(optimizer=optimizer, loss="mse", steps_per_execution=3)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
        assert same_on_all_ranks(model.get_weights())
        np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.02, rtol=1e-6)

    def unbuilt():
        keras.utils.set_random_seed(hvd.rank())
        return keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
    train(make_model(seed=hvd.rank()), [broadcast(1)])
    train(unbuilt(), [broadcast(1)])
    built = make_model()
    layers = [type(each).from_config(each.get_config()) for each in built.layers]
    on_another_rank = keras.Sequential(layers, name=built.name)
    train(built if hvd.rank() == 0 else on_another_rank, [broadcast(1)])
    for model in (make_model(seed=hvd.rank()), unbuilt()):
        with pytest.raises(hvd.MismatchError):
            train(model, [])
    model = unbuilt()

    class Disturbance(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weight = model.trainable_variables[0]
            weight.assign(weight + hvd.rank())

    with pytest.raises(hvd.MismatchError):
        train(model, [broadcast(1), Disturbance()])
