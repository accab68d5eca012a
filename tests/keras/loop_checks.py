"""Test custom training loops and steps with Keras 3 on any framework."""

from contextlib import nullcontext
from unittest import mock

import keras
import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.recipe import Sharding
from tests.keras import close, exchanges, same_on_all_ranks
from tests.keras.models import (
    BATCH,
    EAGER,
    TORCH,
    check_fit,
    data,
    fit,
    gradients_of,
    make_model,
    reference,
    rows_of_this_rank,
    trained_on_unions,
)


def test_sharded_data_in_fit():
    """Every sample counts once, and the same, in each epoch, also those of an uneven end."""
    samples = 3 * BATCH * hvd.size() + 1
    x, y = (array[:samples] for array in data())
    for shuffles in (True, False):
        batches = hvd.shard((x, y), BATCH, seed=5)
        seen = []
        for _ in range(2):
            steps = [batches[step] for step in range(len(batches))]
            seen.append(np.concatenate([part[0] for part in steps]))
            batches.on_epoch_end()
            means = [float(weights.mean()) for *_, weights in steps]
            np.testing.assert_allclose(np.mean(hvd.allgather_object(means), axis=0), 1, rtol=1e-6)
        for rows in seen:
            everyone = np.concatenate(hvd.allgather_object(rows))
            np.testing.assert_array_equal(np.sort(everyone[:, 0]), np.sort(x[:, 0]))
        assert not np.array_equal(*seen)
        tensors = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
        looped = np.concatenate([part for part, _ in hvd.shard(tensors, BATCH, seed=5)])
        np.testing.assert_array_equal(looped, seen[0])
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", run_eagerly=EAGER, jit_compile=False)
        weights = np.linspace(0.5, 2.0, samples, dtype=np.float32)
        batches = hvd.shard((x, y, weights), BATCH)
        with exchanges() as count:
            model.fit(batches, epochs=2, shuffle=shuffles, verbose=0)
        assert len(count) == 2 * len(batches)
        assert batches.position() == (2, 0)
        assert same_on_all_ranks(model.get_weights())
        expected = make_model()
        expected.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=EAGER, jit_compile=False)
        for epoch in range(2):
            for step in batches.sharding.global_batches(epoch):
                expected.train_on_batch(x[step], y[step], sample_weight=weights[step])
        assert close(model.get_weights(), expected.get_weights())


def test_fit_takes_every_sample_once():
    """So it does in each call, also after a position within an epoch."""
    for per_epoch in (None, 6, 3):
        takes_every_sample_once(per_epoch)
    # There, Keras' workers would give the second epoch of a fit batches of the first one again.
    with pytest.raises(ValueError, match="have workers=2") if TORCH else nullcontext():
        takes_every_sample_once(3, workers=2)


def takes_every_sample_once(per_epoch, workers=1):
    x = np.arange(12 * hvd.size(), dtype=np.float32)[:, None]
    batches = hvd.shard((x, x), 2, seed=5)
    batches.workers = workers
    half = batches.sharding.position(1, 3)
    ends, seen = [], np.zeros(len(x))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True, jit_compile=False)
    train = model.train_step

    def step(*arguments):
        rows = keras.ops.convert_to_numpy(arguments[-1][0])
        seen[rows[:, 0].astype(int)] += 1
        return train(*arguments)

    model.train_step = step
    end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(batches.state_dict()["epoch"])
    )
    epochs = 1 if per_epoch is None else 6 // per_epoch
    listed = keras.callbacks.CallbackList([end], add_history=True, model=model)
    for call, callbacks in enumerate((end, listed)):
        if call:
            batches.load_state_dict(half)
        model.fit(batches, epochs=epochs, steps_per_epoch=per_epoch, callbacks=callbacks, verbose=0)
        assert batches.position()[0] == call + 1
        np.testing.assert_array_equal(sum(hvd.allgather_object(seen)), call + 1)
    assert ends == ([1, 2] if epochs == 1 else [0, 1, 1, 2])


def test_the_ranks_that_are_left_share_the_data_in_fit():
    size = hvd.size()
    batches = hvd.shard(np.arange(6 * size), 2, shuffle=False)
    before = batches[0]
    assert batches.position() == (0, 1)
    batches.renumber(batches.position(), 0, 1)  # all others have died
    np.testing.assert_array_equal(batches[0], before)  # which all ranks had taken
    np.testing.assert_array_equal(batches[1], np.arange(2 * size, 4 * size))
    batches.on_epoch_end()
    np.testing.assert_array_equal(batches[0], np.arange(2 * size))


def test_the_order_of_an_epoch_is_made_once():
    batches = hvd.shard(np.zeros(5 * hvd.size()), 1)
    make = Sharding.indices
    with mock.patch.object(Sharding, "indices", autospec=True, side_effect=make) as made:
        for _ in range(2):
            for step in range(5):
                assert len(batches[step]) == 1
            batches.on_epoch_end()
    assert made.call_count == 2


class Weighted(keras.Sequential):
    """A model whose training step passes the number of samples."""

    def train_step(self, data):
        x, y = data
        gradients = gradients_of(self, x, y)
        count = keras.ops.shape(x)[0]
        self.optimizer.apply(gradients, self.trainable_variables, batch_size=count)
        return {"rows": keras.ops.cast(count, "float32")}


def test_a_custom_training_step_in_fit():
    """The last batch is smaller and counts in proportion to its samples."""
    sizes_of_steps = [[BATCH] * hvd.size(), [1 + rank for rank in range(hvd.size())]]
    expected = trained_on_unions(keras.optimizers.SGD(0.1), sizes_of_steps)
    batches = [keras.ops.convert_to_numpy(x) for x, _ in rows_of_this_rank(sizes_of_steps)]
    targets = [keras.ops.convert_to_numpy(y) for _, y in rows_of_this_rank(sizes_of_steps)]
    model = Weighted(make_model().layers)
    model.set_weights(make_model().get_weights())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    x, y = np.concatenate(batches), np.concatenate(targets)
    fit(model, optimizer, x, y, BATCH, graph=True)
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), expected)


def test_loss_scaling_alone_takes_no_batch_size():
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="batch_size"):
        scaling.apply([keras.ops.ones(())], [keras.Variable(1.0)], batch_size=1)


def test_gradients_that_only_some_ranks_have():
    model = make_model()
    variables = model.trainable_variables
    before = model.get_weights()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    last = hvd.rank() == hvd.size() - 1

    def ones(variable):
        return keras.ops.ones(variable.shape)

    # The first: the last rank alone has it; the last: none has; those between: all.
    gradients = [
        ones(v) if 0 < n < 3 or (n == 0 and last) else None for n, v in enumerate(variables)
    ]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply(gradients, variables)
    moved = [a - b for a, b in zip(before, model.get_weights(), strict=True)]
    for found, expected in zip(moved, (1 / hvd.size(), 1, 1, 0), strict=True):
        np.testing.assert_allclose(found, np.full_like(found, expected), atol=1e-6)
    # A rank without any gradient takes part.
    optimizer.apply([ones(v) if last else None for v in variables], variables)
    assert same_on_all_ranks(model.get_weights())


def test_passes_in_which_only_some_ranks_have_gradients():
    model = make_model()
    before = model.get_weights()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    variables = model.trainable_variables
    some = [keras.ops.ones(v.shape) for v in variables]
    none = [None] * len(variables)
    optimizer.apply(some if hvd.rank() == 0 else none, variables)
    optimizer.apply(none, variables)
    for found, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(found, start - 0.5 / hvd.size(), atol=1e-6)


def test_ranks_with_different_variables_get_an_error_on_every_rank():
    units = 2 + hvd.rank() % 2
    layer = keras.layers.Dense(units, name="odd")
    layer.build((None, 3))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    gradients = [keras.ops.ones(v.shape) for v in layer.trainable_variables]
    with pytest.raises(hvd.HorovodInternalError, match=r"odd/kernel.*float32\[3, 2\]"):
        optimizer.apply(gradients, layer.trainable_variables)
    check_fit(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), reference(keras.optimizers.SGD(0.1))
    )
