"""Virtual ranks of Keras on TensorFlow, in eager mode, in tf.function and in fit."""

import contextlib
import functools

import numpy as np
import pytest

from hvdlite.world import parts
from tests.harness import ranks

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvdlite
import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras

SIZE = 5


@contextlib.contextmanager
def virtual(size=SIZE, **environment):
    """Start hvdlite with virtual ranks, and end it."""
    hvd.shutdown()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            hvd.init(virtual_ranks=size)
        yield
    finally:
        hvd.shutdown()


def data(samples=37):
    generator = np.random.default_rng(5)
    return generator.standard_normal((samples, 3)).astype(np.float32)


def make_model(*more):
    model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones"), *more])
    model.build((None, 3))
    return model


def wrap(model=None, **options):
    inner = keras.optimizers.SGD(1.0)
    return hvd.DistributedOptimizer(inner, model=model, **options)


def gradients_of(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True)))
    return tape.gradient(loss, model.trainable_variables)


def apply_to(optimizer, model, x):
    optimizer.apply(gradients_of(model, tf.convert_to_tensor(x)), model.trainable_variables)


@ranks(1, 2)
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_those_of_all_samples(compiled):
    with virtual():
        model = make_model()
        optimizer = wrap()

        def step(x):
            optimizer.apply(
                gradients_of(model, x), model.trainable_variables, batch_size=tf.shape(x)[0]
            )

        run = tf.function(step, reduce_retracing=True) if compiled else step
        steps = 0
        for x in hvdlite.shard(data(), batch_size=37, shuffle=False):
            run(tf.constant(x))
            steps += optimizer.stepped
        assert steps == parts.current.step == int(optimizer.iterations) == 1
        x, kernel, bias = data().astype(np.float64), np.ones((3, 2)), np.zeros(2)
        output = x @ kernel + bias
        gradient = 2 * output / output.size
        np.testing.assert_allclose(model.weights[0].numpy(), kernel - x.T @ gradient, rtol=1e-5)
        np.testing.assert_allclose(model.weights[1].numpy(), bias - gradient.sum(0), rtol=1e-5)


@ranks(2)
@pytest.mark.parametrize("mode", ["eager", "compiled", "fit"])
def test_what_a_model_has_when_a_step_begins_counts(mode):
    """Weights that are loaded, and forward passes outside of steps, before and between steps."""
    x = data(2 * 40)
    with virtual():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        frozen = keras.layers.Dense(3, kernel_initializer="ones", trainable=False)
        model = keras.Sequential([layer, frozen])
        model.build((None, 3))
        model.compile(wrap(model), "mse")
        expected = np.zeros(3)

        step = functools.partial(apply_to, model.optimizer, model)
        run = tf.function(step, reduce_retracing=True) if mode == "compiled" else step
        for number, rows in enumerate((x[:40], x[40:])):
            layer.moving_mean.assign(expected + 8.0)
            frozen.kernel.assign(np.eye(3) * (number + 2))
            model(x[:4], training=True)
            expected = 0.5 * (expected + 8.0) + 0.5 * x[:4].astype(np.float64).mean(0)
            if mode == "fit":
                dataset = hvd.shard((rows, np.zeros_like(rows)), batch_size=8, shuffle=False)
                model.fit(dataset, verbose=0, shuffle=False)
            else:
                for part in hvdlite.shard(rows, batch_size=8, shuffle=False):
                    run(tf.constant(part))
            expected = 0.5 * expected + 0.5 * rows.astype(np.float64).mean(0)
            np.testing.assert_allclose(layer.moving_mean.numpy(), expected, rtol=1e-5)
            np.testing.assert_array_equal(frozen.kernel.numpy(), np.eye(3) * (number + 2))
            assert parts.current.step == int(model.optimizer.iterations) == number + 1


@ranks(2)
@pytest.mark.parametrize("broadcast", ["callback", "call"])
def test_random_layers_after_a_broadcast(broadcast):
    """The masks are those of the virtual rank and the step, whatever has been drawn before."""
    with virtual():
        keras.utils.set_random_seed(1)
        dropout = keras.layers.Dropout(0.5)
        model = make_model(dropout)
        wrap(model)
        hvd.seed(1)
        expected = hvd.allgather_object(dropout.seed_generator.state.numpy())
        if broadcast == "callback":
            model(data(), training=True)
            callback = hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0)
            callback.set_model(model)
            callback.on_train_begin()
        else:
            hvd.broadcast_variables(model.variables, 0)
        found = hvd.allgather_object(dropout.seed_generator.state.numpy())
        np.testing.assert_array_equal(found, expected)


@ranks(2)
def test_buffers_that_differ_between_processes_are_found():
    with virtual():
        layer = keras.layers.BatchNormalization()
        model = keras.Sequential([layer])
        model.build((None, 3))
        optimizer = wrap(model)
        found = ""
        for x in hvdlite.shard(data(80), batch_size=8, shuffle=False):
            if parts.current.step == 1 and not parts.current.is_within_step():
                layer.moving_mean.assign(layer.moving_mean + float(hvd.rank()))
            try:
                apply_to(optimizer, model, x)
            except hvd.MismatchError as error:
                found = str(error)
        assert ("moving_mean' is " in found) == (hvd.size() > 1)


@ranks(1)
def test_what_is_refused():
    with virtual():
        model = make_model()
        scaling = keras.optimizers.LossScaleOptimizer
        with pytest.raises(ValueError, match="a LossScaleOptimizer, by which parts"):
            hvd.DistributedOptimizer(scaling(keras.optimizers.SGD(1.0)))
        with pytest.raises(ValueError, match="a LossScaleOptimizer, by which parts"):
            apply_to(scaling(wrap()), model, data())
        with pytest.raises(ValueError, match="model= belongs to one model"):
            type(optimizer := wrap(model)).from_config(optimizer.get_config())
        with pytest.raises(ValueError, match="has no weights yet"):
            wrap(keras.Sequential([keras.layers.Dense(2)]))
        accumulating = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="gradient_accumulation_steps cannot be used"):
            hvd.DistributedOptimizer(accumulating)
        with pytest.raises(ValueError, match="GradientDescentOptimizer cannot be used"):
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(model(data()))
        with pytest.raises(ValueError, match="DistributedGradientTape cannot be used"):
            tape.gradient(loss, model.trainable_variables)
        with pytest.raises(ValueError, match="SyncBatchNormalization cannot be used"):
            hvd.SyncBatchNormalization()(data(), training=True)
        with pytest.raises(ValueError, match=r"hvd.sharded cannot be used"):
            tf.data.Dataset.range(8).apply(hvd.sharded(2))


@ranks(2)
def test_state_goes_on():
    with virtual():
        model = make_model()
        optimizer = wrap(compression=hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.5)))
        for x in hvdlite.shard(data(), batch_size=4):
            apply_to(optimizer, model, x)
        optimizer.consolidate_exchange_state()
        saved = optimizer.exchange_state_dict()
        assert saved["virtual"]["step"] == 2
        kept = saved["virtual"]["compression"]
        assert sorted(kept) == list(range(SIZE))
        assert all(kept.values())
    with virtual():
        optimizer = wrap(compression=hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.5)))
        for x in hvdlite.shard(data(), batch_size=4):
            apply_to(optimizer, model, x)
        optimizer.load_exchange_state_dict(saved)
        assert parts.current.step == 2


@ranks(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_is_not_finite_is_left_out(compiled):
    with virtual(HVDLITE_NOT_FINITE="skip"):
        model = make_model()
        optimizer = wrap()

        step = functools.partial(apply_to, optimizer, model)
        run = tf.function(step, reduce_retracing=True) if compiled else step
        before, stepped = model.get_weights(), []
        for x in hvdlite.shard(data(2 * 4 * SIZE), batch_size=4):
            part = (parts.current.step, hvd.virtual_rank())
            run(tf.constant(x * np.float32(np.nan if part == (0, 3) else 1)))
            stepped += [parts.current.step] * optimizer.stepped
            if parts.current.step == 1 and part[0] == 0:
                np.testing.assert_array_equal(model.get_weights()[0], before[0])
        assert stepped == [2]
        assert int(optimizer.iterations) == 1
        assert np.isfinite(model.get_weights()[0]).all()
