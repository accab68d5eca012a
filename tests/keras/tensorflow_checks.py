"""Test Keras 3 on TensorFlow only: graphs, XLA, sparse gradients, optimizers of TensorFlow 1."""

import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite.keras as hvd
import hvdlite.tensorflow as tf_hvd
import hvdlite.tensorflow.keras as tf_keras_hvd
from hvdlite import common
from tests import events
from tests.keras import close, exchanges, same_on_all_ranks
from tests.keras.models import BATCH, STEPS, check_fit, data, fit, make_model, own, reference


def test_every_adapter_makes_the_same_optimizer():
    expected, options = reference(keras.optimizers.SGD(0.1)), {"op": hvd.Sum, "num_groups": 1}
    other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
    for adapter in (tf_hvd, tf_keras_hvd):
        check_fit(adapter.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), expected)
        found = adapter.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        assert type(found).__bases__ == type(other).__bases__
        assert found._hvdlite.options == other._hvdlite.options


def test_several_steps_in_one_execution():
    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        loss="mse",
        steps_per_execution=3,
    )
    x, y = map(own, data())
    with exchanges() as count:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert len(count) == STEPS
    assert close(model.get_weights(), reference(keras.optimizers.SGD(0.1)))


def test_events_are_averages_and_of_one_writer():
    """Keras writes them by TensorFlow on PyTorch, too."""
    pytest.importorskip("tensorboard")
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    model = make_model()
    history = fit(
        model,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        *map(own, data()),
        BATCH,
        epochs=2,
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.summary_writer(folder, write_graph=False),
        ],
    )
    losses = hvd.allgather_object(history.history["loss"])
    assert losses == [losses[0]] * hvd.size()
    hvd.barrier()
    assert len(events.files(folder)) == 1
    found = [loss for _, loss in events.scalars(folder)["epoch_loss"]]
    assert found == pytest.approx(losses[0], rel=1e-6)


def test_embeddings():
    def make():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(7, 3), keras.layers.Dense(1)]
        )
        draw = np.random.default_rng(3).normal
        model.set_weights([draw(size=weight.shape) for weight in model.get_weights()])
        return model

    draw = np.random.default_rng(4)
    x = draw.integers(0, 7, (BATCH * STEPS * hvd.size(), 2))
    y = draw.normal(size=(len(x), 2, 1))
    for options in ({}, {"sparse_as_dense": True}, {"backward_passes_per_step": 2}):
        passes = options.get("backward_passes_per_step")
        plain = keras.optimizers.SGD(0.1 * (passes or 1), gradient_accumulation_steps=passes)
        expected, model = make(), make()
        fit(expected, plain, x, y, BATCH * hvd.size())
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        fit(model, optimizer, own(x), own(y), BATCH)
        assert close(model.get_weights(), expected.get_weights())
        assert same_on_all_ranks(model.get_weights())


def test_xla_in_a_custom_loop_is_refused():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step():
        optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])

    with pytest.raises(ValueError, match="jit_compile"):
        step()
    hvd.barrier()


def test_a_gradient_that_only_some_ranks_have_in_a_graph():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        gradients = [tf.ones(v.shape) for v in model.trainable_variables]
        if hvd.rank():
            gradients[0] = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says that there is none
            optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(tf.errors.OpError, match="first/kernel' is None on rank"):
        step()


def test_optimizers_of_tensorflow_1():
    def train(optimizer, values):
        weight = tf.Variable([1.0, 2.0])
        for value in values:
            optimizer.minimize(lambda value=value: tf.reduce_sum(weight * value), var_list=[weight])
        return weight.numpy()

    kind = tf.compat.v1.train.MomentumOptimizer
    wrapped = tf_hvd.DistributedOptimizer(kind(0.1, 0.9))
    assert isinstance(wrapped, kind)
    with exchanges() as count:
        found = train(wrapped, [1.0 + hvd.rank(), 3.0 - hvd.rank()])
    assert len(count) == 2
    assert found.tolist() == train(kind(0.1, 0.9), [1.5, 2.5]).tolist()
    with pytest.raises(ValueError, match="needs a Keras optimizer"):
        tf_hvd.DistributedOptimizer(kind(0.1, 0.9), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="wrap it once"):
        tf_hvd.DistributedOptimizer(wrapped)
    with pytest.raises(TypeError, match="expected a Keras optimizer, found float"):
        tf_hvd.DistributedOptimizer(0.1)


def test_the_adapter_of_tf_keras_has_all_that_the_one_of_keras_has():
    assert set(hvd.__all__) <= set(tf_keras_hvd.__all__)
    beside = {"elastic", *common.names} - {*common.__all__}  # the core
    for adapter in (hvd, tf_keras_hvd):
        assert all(hasattr(adapter, name) for name in {*adapter.__all__} - beside)
    names = {name for name in vars(hvd.callbacks) if name.endswith(("Callback", "Checkpoint"))}
    assert len(names) == 5
    assert all(getattr(tf_keras_hvd.callbacks, name).__doc__ for name in names)
