"""Measures of an exchange, and of the ranks' agreement."""

import contextlib

import numpy as np
import pytest

from hvdlite import collectives, runtime


@contextlib.contextmanager
def exchanges():
    """A list that grows by one with every operation on the gradient lane."""
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


def flat(weights):
    return np.concatenate([np.asarray(weight, np.float64).ravel() for weight in weights])


def same_on_all_ranks(weights):
    """Return whether the ranks' weights are the same bits."""
    content = b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)
    return len(set(collectives.allgather_object(content))) == 1


def close(found, expected, tolerance=1e-5):
    found, expected = flat(found), flat(expected)
    return np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def check_replicas(hvd, keras, kinds, make_model, fit, x, y, batch):
    """Train replicas that differ, and some that may.

    Args:
        hvd: the adapter.
        keras: the Keras that it is for.
        kinds: of optimizers, which take a learning rate.
        make_model: takes a seed.
        fit: takes a model, an optimizer, ``x``, ``y``, ``batch`` and callbacks.
        x: this rank's inputs.
        y: its targets.
        batch: the size of a batch.
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
