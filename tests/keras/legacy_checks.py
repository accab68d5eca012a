"""Test legacy Keras (``tf_keras``) in processes with TF_USE_LEGACY_KERAS=1."""

import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tensorflow as tf_hvd
from tests.keras import close, exchanges, not_finite, same_on_all_ranks
from tests.keras.models import (
    BATCH,
    KINDS,
    STEPS,
    LossScaling,
    bad_data,
    data,
    data_without,
    fit,
    hvd,
    keras,
    make_model,
    own,
    reference,
)


def test_legacy_keras_it_is():
    assert keras.Model.__module__.startswith("tf_keras")
    assert "keras" not in sys.modules


def test_each_list_of_variables_has_its_own_backward_passes():
    mean = (hvd.size() + 1) / 2
    for kind in KINDS:
        first, second = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])
        both = [first, second, tf.Variable([[0.0]])]
        optimizer = kind(1.0)
        if hasattr(optimizer, "build"):
            optimizer.build(both)
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        factor = tf.fill([2], hvd.rank() + 1.0)
        for _ in range(2):
            optimizer.apply_gradients([(factor, first)])
            optimizer.apply_gradients([(10 * factor, second)])
        assert first.numpy().tolist() == [-2 * mean, -2 * mean]
        assert second.numpy().tolist() == [-20 * mean, -20 * mean]
        for _ in range(2):  # one more is trained, as after a layer has been thawed
            pairs = zip([tf.reshape(factor[0], [1, 1]), factor], reversed(both[1:]), strict=True)
            optimizer.apply_gradients(list(pairs))
        assert both[2].numpy().tolist() == [[-2 * mean]]
        assert second.numpy().tolist() == [-22 * mean, -22 * mean]


def test_steps_that_are_not_finite_are_left_out_on_all_ranks():
    scaling = partial(LossScaling, dynamic=False, initial_scale=8.0)
    rank, (x, y) = hvd.rank(), map(own, bad_data(np.nan))
    expected = [reference(kind(0.1, momentum=0.9), data_without(2)) for kind in KINDS]
    for kind, weights in zip(KINDS, expected, strict=True):
        for wrap, graph in [(lambda made: made, False), (scaling, True)]:
            with not_finite("skip") as told:
                model = make_model()
                optimizer = wrap(hvd.DistributedOptimizer(kind(0.1, momentum=0.9)))
                fit(model, optimizer, x, y, BATCH, graph=graph)
                assert same_on_all_ranks(model.get_weights())
            assert int(optimizer.iterations) == STEPS - 1
            assert close(model.get_weights(), weights)
            assert len(told) == (rank == 0)


def test_what_is_saved():
    for kind in KINDS:
        x, y = data()
        expected, model = make_model(), make_model()
        fit(expected, kind(0.1, momentum=0.9), x, y, BATCH * hvd.size())
        fit(model, hvd.DistributedOptimizer(kind(0.1, momentum=0.9)), own(x), own(y), BATCH)
        folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
        # The state of the older optimizers is in the older files alone.
        suffix = "keras" if kind is keras.optimizers.SGD else "h5"
        path = folder / f"model-{hvd.rank()}.{suffix}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras recommends the newer ones
            model.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is kind
        loaded = hvd.load_model(path)
        options = {"shuffle": False, "verbose": 0}
        expected.fit(x, y, batch_size=BATCH * hvd.size(), **options)
        with exchanges() as count:
            loaded.fit(own(x), own(y), batch_size=BATCH, **options)
        assert len(count) == STEPS
        assert close(loaded.get_weights(), expected.get_weights())


def test_what_is_refused():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="expected an optimizer"):
        hvd.DistributedOptimizer(1)
    model = make_model()
    with pytest.raises(ValueError, match="jit_compile=False"):
        fit(model, optimizer, *map(own, data()), BATCH, graph=True, jit_compile=True)
    hvd.broadcast_global_variables(0, model=model)


def test_local_variables_are_not_broadcast():
    model = make_model(seed=hvd.rank())
    before = model.get_weights()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=model.layers[0].weights
    )
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.0), local_layers=[model.layers[0]]
    )
    fit(model, optimizer, *map(own, data()), BATCH, callbacks=[callback])
    assert close(model.get_weights()[:2], before[:2])
    assert not same_on_all_ranks(model.get_weights()[:2])
    assert same_on_all_ranks(model.get_weights()[2:])
    with pytest.raises(TypeError, match="expected a list of variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", model.weights[0])


def test_gradients_are_averaged_once_by_whoever_comes_first():
    mean = np.arange(1, hvd.size() + 1).mean()
    plain = keras.optimizers.legacy.SGD
    for make in (*KINDS, lambda rate: LossScaling(plain(rate), dynamic=False, initial_scale=4.0)):
        weight = tf.Variable([1.0, 2.0])
        optimizer = tf_hvd.DistributedOptimizer(make(0.1))

        def compute(optimizer=optimizer, weight=weight):
            loss = lambda: tf.reduce_sum(weight) * (1.0 + hvd.rank())  # noqa: E731
            return optimizer._compute_gradients(loss, [weight])

        with exchanges() as count:
            ((gradient, variable),) = compute()
            optimizer.apply_gradients([(gradient, variable)])
        assert len(count) == 1
        assert close(
            [gradient.numpy(), weight.numpy()], [[mean] * 2, [1 - mean / 10, 2 - mean / 10]]
        )
        # A gradient that was changed may be this rank's own, and is averaged (again).
        ((gradient, variable),) = compute()
        optimizer.apply_gradients([(tf.minimum(gradient, 1.0), variable)])
        assert close([weight.numpy()], [[0.9 - mean / 10, 1.9 - mean / 10]])
    total = tf_hvd.DistributedOptimizer(plain(0.1), op=hvd.Sum)
    ((gradient, variable),) = total._compute_gradients(lambda: tf.reduce_sum(weight), [weight])
    assert close([gradient.numpy()], [[hvd.size()] * 2])
    with pytest.raises(ValueError, match=r"would be summed \(again\)"):
        total.apply_gradients([(gradient / 2, variable)])
    # One part of a model after the other, as with several learning rates.
    total = tf_hvd.DistributedOptimizer(plain(1.0), op=hvd.Sum)
    parts = [tf.Variable([0.0]), tf.Variable([0.0])]
    with exchanges() as count:
        for pair in total._compute_gradients(lambda: tf.add_n(parts), parts):
            total.apply_gradients([pair])
    assert len(count) == 1
    assert [part.numpy().tolist() for part in parts] == [[-hvd.size()]] * 2

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.Variable([1.0, 2.0])
        optimizer = tf_hvd.DistributedOptimizer(plain(0.1))
        loss = tf.reduce_sum(weight) * (1.0 + hvd.rank())
        with exchanges() as count:
            gradients = optimizer.get_gradients(loss, [weight])
            step = optimizer.apply_gradients([(gradients[0], weight)])
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(2):  # ranks compare their options with the second one
                session.run(step)
        assert len(count) == 2
        assert close([session.run(weight)], [[1 - mean / 5, 2 - mean / 5]])
