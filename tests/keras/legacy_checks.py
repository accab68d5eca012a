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
import hvdlite.tensorflow.keras as hvd
from tests.keras.measures import (
    check_copies,
    check_drift,
    check_normalization,
    check_replicas,
    check_several_steps,
    check_words_and_limits,
    close,
    exchanges,
    not_finite,
    same_on_all_ranks,
)

BATCH, STEPS = 4, 6
keras = tf.keras
KINDS = [keras.optimizers.SGD, keras.optimizers.legacy.SGD]


def data():
    draw = np.random.default_rng(0).normal
    x = draw(size=(BATCH * STEPS * hvd.size(), 5)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def own(array):
    return array[hvd.rank() :: hvd.size()]


def make_model(seed=1):
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    )
    draw = np.random.default_rng(seed).normal
    model.set_weights([draw(size=weight.shape) / 2 for weight in model.get_weights()])
    return model


def fit(model, optimizer, x, y, batch, callbacks=(), graph=False, **options):
    # Tracing a step takes longer than all steps do without.
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=not graph, **options)
    return model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[*callbacks])


def reference(optimizer, passes=1):
    model = make_model()
    fit(model, optimizer, *data(), BATCH * hvd.size() * passes)
    return model.get_weights()


def check_fit(optimizer, expected, steps=STEPS, **options):
    model = make_model()
    with exchanges() as count:
        fit(model, optimizer, *map(own, data()), BATCH, **options)
    assert len(count) == steps, count
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), expected)


def test_legacy_keras_it_is():
    assert keras.Model.__module__.startswith("tf_keras")
    assert "keras" not in sys.modules


def test_fit_exchanges_in_every_step():
    for kind in KINDS:
        optimizer = kind(0.1, momentum=0.9)
        wrapped = hvd.DistributedOptimizer(optimizer)
        assert wrapped is optimizer
        assert isinstance(wrapped, kind)
        check_fit(wrapped, reference(kind(0.1, momentum=0.9)), graph=True)
        check_fit(
            tf_hvd.DistributedOptimizer(kind(0.02), op=hvd.Sum), reference(kind(0.02 * hvd.size()))
        )
        check_fit(
            hvd.DistributedOptimizer(kind(2.0, global_clipnorm=0.1)),
            reference(kind(2.0, global_clipnorm=0.1)),
        )


def test_custom_loops():
    for kind in KINDS:
        expected = reference(kind(0.1))
        for mode in (lambda step: step, tf.function):
            model, optimizer = make_model(), hvd.DistributedOptimizer(kind(0.1))

            @mode
            def step(x, y, model=model, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x) - y))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            with exchanges() as count:
                for x, y in zip(*(np.split(own(array), STEPS) for array in data()), strict=True):
                    step(tf.constant(x), tf.constant(y))
            assert len(count) == STEPS
            assert close(model.get_weights(), expected)
            assert same_on_all_ranks(model.get_weights())


def test_uneven_batches_give_the_gradient_of_their_union():
    sizes = [1 + 3 * rank for rank in range(hvd.size())]
    x, y = (array[: sum(sizes)] for array in data())
    rows = slice(sum(sizes[: hvd.rank()]), sum(sizes[: hvd.rank() + 1]))
    scaling = keras.mixed_precision.LossScaleOptimizer
    for kind in KINDS:
        union = make_model()
        fit(union, kind(0.1), x, y, len(x))
        for optimizer in (
            hvd.DistributedOptimizer(kind(0.1)),
            scaling(hvd.DistributedOptimizer(kind(0.1)), dynamic=False, initial_scale=1),
        ):
            model = make_model()
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))
            gradients = tape.gradient(loss, model.trainable_variables)
            pairs = list(zip(gradients, model.trainable_variables, strict=True))
            optimizer.apply_gradients(pairs, batch_size=sizes[hvd.rank()])
            assert same_on_all_ranks(model.get_weights())
            assert close(model.get_weights(), union.get_weights())
        twice = hvd.DistributedOptimizer(kind(0.1), backward_passes_per_step=2)
        for optimizer in (twice, scaling(twice)):
            with pytest.raises(ValueError, match="here those of several add up"):
                optimizer.apply_gradients(pairs, batch_size=1)


def test_backward_passes_add_up():
    # As many samples in one batch.
    for kind in KINDS:
        draw = np.arange(BATCH * STEPS * hvd.size()).reshape(STEPS // 2, 2, BATCH, hvd.size())
        x, y = data()
        model = make_model()
        fit(model, kind(0.1), x[draw.reshape(-1)], y[draw.reshape(-1)], 2 * BATCH * hvd.size())
        expected = model.get_weights()
        for average, rate in ((True, 0.1), (False, 0.05)):
            optimizer = hvd.DistributedOptimizer(
                kind(rate), backward_passes_per_step=2, average_aggregated_gradients=average
            )
            check_fit(optimizer, expected, STEPS // 2, graph=average)
            assert int(optimizer.iterations) == STEPS


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


def test_steps_that_overflow_on_one_rank_are_skipped_on_all():
    scaling = keras.mixed_precision.LossScaleOptimizer
    x, y = data()
    bad = y.copy()
    bad[2 * BATCH * hvd.size() + hvd.size() - 1] = np.inf  # the last rank's, in the third step
    keep = np.r_[: 2 * BATCH * hvd.size(), 3 * BATCH * hvd.size() : len(x)]
    for kind in KINDS:
        skipping = make_model()
        fit(skipping, kind(0.1), x[keep], y[keep], BATCH * hvd.size())
        for make in (
            lambda kind=kind: scaling(hvd.DistributedOptimizer(kind(0.1)), initial_scale=2.0**10),
            lambda kind=kind: hvd.DistributedOptimizer(scaling(kind(0.1), initial_scale=2.0**10)),
        ):
            model, optimizer = make_model(), make()
            fit(model, optimizer, own(x), own(bad), BATCH, graph=True)
            assert float(optimizer.loss_scale) == 2.0**9
            assert same_on_all_ranks(model.get_weights())
            assert close(model.get_weights(), skipping.get_weights())
        twice = hvd.DistributedOptimizer(scaling(kind(0.05)), backward_passes_per_step=2)
        model = make_model()
        fit(model, twice, own(x), own(y), BATCH)
        assert same_on_all_ranks(model.get_weights())
        assert close(model.get_weights(), reference(kind(0.1), passes=2))


def test_steps_that_are_not_finite_are_left_out_on_all_ranks():
    scaling = partial(keras.mixed_precision.LossScaleOptimizer, dynamic=False, initial_scale=8.0)
    rank, size = hvd.rank(), hvd.size()
    x, y = data()
    bad = y.copy()
    bad[2 * BATCH * size + size - 1] = np.nan  # the last rank's, in the third step
    keep = np.r_[: 2 * BATCH * size, 3 * BATCH * size : len(x)]
    for kind in KINDS:
        expected = make_model()
        fit(expected, kind(0.1, momentum=0.9), x[keep], y[keep], BATCH * size)
        for wrap, graph in [(lambda made: made, False), (scaling, True)]:
            with not_finite("skip") as told:
                model = make_model()
                optimizer = wrap(hvd.DistributedOptimizer(kind(0.1, momentum=0.9)))
                fit(model, optimizer, own(x), own(bad), BATCH, graph=graph)
                assert same_on_all_ranks(model.get_weights())
            assert int(optimizer.iterations) == STEPS - 1
            assert close(model.get_weights(), expected.get_weights())
            assert len(told) == (rank == 0)


def test_what_was_trained_before_and_what_is_saved():
    for kind in KINDS:
        x, y = data()
        expected, model = make_model(), make_model()
        # In batches of the size that follows: a compiled step would be used again.
        first = (x[: BATCH * STEPS], y[: BATCH * STEPS], BATCH)
        for each in (expected, model):
            fit(each, kind(0.1, momentum=0.9), *first, graph=True)
        hvd.DistributedOptimizer(model.optimizer)
        options = {"shuffle": False, "verbose": 0}
        expected.fit(x, y, batch_size=BATCH * hvd.size(), **options)
        with exchanges() as count:
            model.fit(own(x), own(y), batch_size=BATCH, **options)
        assert len(count) == STEPS
        assert close(model.get_weights(), expected.get_weights())
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
        expected.fit(x, y, batch_size=BATCH * hvd.size(), **options)
        with exchanges() as count:
            loaded.fit(own(x), own(y), batch_size=BATCH, **options)
        assert len(count) == STEPS
        assert close(loaded.get_weights(), expected.get_weights())


def test_callbacks():
    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            same.append(same_on_all_ranks(self.model.get_weights()))

        def on_epoch_end(self, epoch, logs=None):
            logged.append(dict(logs))

    for kind in KINDS:
        same, logged = [], []
        best = Path(tempfile.mkdtemp()) / "best.keras"
        model = make_model(seed=hvd.rank())
        history = fit(
            model,
            hvd.DistributedOptimizer(kind(0.2, momentum=0.9)),
            *map(own, data()),
            BATCH,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
                hvd.callbacks.BestModelCheckpoint("loss", filepath=str(best)),
                Spy(),
            ],
        )
        assert best.exists() == (hvd.rank() == 0)
        assert all(same)
        assert len({str(logs) for logs in hvd.allgather_object(logged)}) == 1
        assert history.history["loss"] == [logged[0]["loss"]]
        assert abs(history.history["lr"][0] - 0.1) < 1e-6
        assert same_on_all_ranks(model.get_weights())


def test_momentum_is_corrected_when_the_rate_changes():
    rates = [0.1, 0.1, 0.2, 0.05]
    for kind in KINDS:
        weight = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(kind(rates[0], momentum=0.9))
        callback = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: rates[epoch])
        callback.set_model(type("Model", (), {"optimizer": optimizer})())
        expected, velocity, old = 0.0, 0.0, rates[0]
        for epoch, rate in enumerate(rates):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            optimizer.apply_gradients([(tf.ones(1), weight)])
            velocity = 0.9 * velocity * rate / old - rate
            expected, old = expected + velocity, rate
            assert abs(float(weight[0]) - expected) < 1e-6


def test_what_is_made_from_a_distributed_optimizer_is_distributed():
    def train(model, optimizer):
        fit(model, optimizer, *map(own, data()), BATCH)

    scaling = keras.mixed_precision.LossScaleOptimizer
    for kind in KINDS:
        check_copies(hvd, keras, kind, scaling, make_model(), train)


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


def test_local_layers_are_not_exchanged():
    for kind in KINDS:
        model, alone = make_model(), make_model()
        x, y = (own(array)[:BATCH] for array in data())
        optimizer = hvd.PartialDistributedOptimizer(
            kind(0.1), local_layers=[model.layers[0]], scale_local_gradients=False
        )
        with exchanges():
            fit(model, optimizer, x, y, BATCH)
        fit(alone, kind(0.1), x, y, BATCH)
        assert close(model.get_weights()[:2], alone.get_weights()[:2])
        assert same_on_all_ranks(model.get_weights()[2:])
        assert not same_on_all_ranks(model.get_weights()[:2])


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
    scaling = keras.mixed_precision.LossScaleOptimizer
    for make in (*KINDS, lambda rate: scaling(plain(rate), dynamic=False, initial_scale=4.0)):
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


def test_replicas_that_differ_are_refused():
    x, y = map(own, data())
    check_replicas(hvd, keras, KINDS, make_model, fit, x, y, BATCH)


def test_several_steps_in_one_execution_and_a_broadcast():
    check_several_steps(keras, hvd, partial(KINDS[0], 0.02), make_model, *map(own, data()))


def test_replicas_that_part_are_found():
    check_drift(hvd, keras, KINDS[-1], make_model, fit, *map(own, data()), BATCH)


def test_what_was_adapted_to_other_data_is_the_roots_after_a_broadcast():
    check_normalization(hvd, keras)


def test_words_and_limits_that_were_adapted_to_other_data_are_an_error():
    check_words_and_limits(hvd, keras)
