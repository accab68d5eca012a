"""Test what Keras 3, on any framework, and both kinds of optimizers of legacy Keras do alike."""

import copy
import pickle
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from hvdlite.gradients.keras_replica import variables_of
from hvdlite.keras._optimizer import distributed_part
from tests.keras import close, exchanges, same_on_all_ranks
from tests.keras.models import (
    BATCH,
    EAGER,
    KINDS,
    LEGACY,
    STEPS,
    TORCH,
    LossScaling,
    Spy,
    apply,
    bad_data,
    check_fit,
    data,
    data_without,
    fit,
    gradients_of,
    hvd,
    keras,
    make_model,
    own,
    reference,
    rows_of_this_rank,
    tensor,
    trained_on_unions,
)


def train(model, optimizer, **options):
    fit(model, optimizer, *map(own, data()), BATCH, **options)


def built(optimizer, layer):
    """Return an optimizer with the variables that it has for a layer; older ones make them late."""
    if hasattr(optimizer, "build"):
        optimizer.build(layer.trainable_variables)
    return optimizer


def ones(variables):
    return [tensor(np.ones(variable.shape, np.float32)) for variable in variables]


def test_fit_exchanges_in_every_step():
    for kind in KINDS:
        optimizer = kind(0.1, momentum=0.9)
        wrapped = hvd.DistributedOptimizer(optimizer)
        assert wrapped is optimizer
        assert isinstance(wrapped, kind)
        assert type(wrapped) is not kind
        assert type(wrapped).__name__ == "SGD"
        check_fit(wrapped, reference(kind(0.1, momentum=0.9)), graph=True)
        total = hvd.DistributedOptimizer(kind(0.02), op=hvd.Sum)
        check_fit(total, reference(kind(0.02 * hvd.size())))


def test_clipping_works_on_the_averages():
    for kind in KINDS:
        for clip in ({"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}):
            check_fit(hvd.DistributedOptimizer(kind(2.0, **clip)), reference(kind(2.0, **clip)))


def modes():
    if TORCH:
        return [lambda step: step]
    import tensorflow as tf

    return [lambda step: step, tf.function]


def test_custom_loops():
    for kind in KINDS:
        expected = reference(kind(0.1, momentum=0.5))
        for mode in modes():
            model = make_model()
            optimizer = built(hvd.DistributedOptimizer(kind(0.1, momentum=0.5)), model)

            @mode
            def step(x, y, model=model, optimizer=optimizer):
                gradients = gradients_of(model, x, y)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            with exchanges() as count:
                for x, y in zip(*(np.split(own(each), STEPS) for each in data()), strict=True):
                    step(tensor(x), tensor(y))
            assert len(count) == STEPS
            assert close(model.get_weights(), expected)
            assert same_on_all_ranks(model.get_weights())


def uneven(step):
    """Return the number of rows of each rank in a step; some have none."""
    return [(3 * rank + 2 * step) % 5 for rank in range(hvd.size() - 1)] + [step + 1]


def test_uneven_batches_give_the_gradient_of_their_union():
    sizes_of_steps = [uneven(step) for step in range(3)]
    for kind in KINDS:
        expected = trained_on_unions(kind(0.1, momentum=0.5), sizes_of_steps)
        for number, optimizer in enumerate(
            [
                hvd.DistributedOptimizer(kind(0.1, momentum=0.5)),
                hvd.DistributedOptimizer(kind(0.1, momentum=0.5), compression=hvd.Compression.fp16),
                LossScaling(hvd.DistributedOptimizer(kind(0.1, momentum=0.5)), initial_scale=1.0),
            ]
        ):
            model = make_model()
            built(optimizer, model)
            variables = model.trainable_variables
            for x, y in rows_of_this_rank(sizes_of_steps):
                gradients = gradients_of(model, x, y) if len(x) else [None] * len(variables)
                if number == 0:
                    pairs = list(zip(gradients, variables, strict=True))
                    optimizer.apply_gradients(pairs, batch_size=len(x))
                else:
                    apply(optimizer, gradients, variables, batch_size=len(x))
            assert same_on_all_ranks(model.get_weights())
            assert close(model.get_weights(), expected, 1e-3)


def test_where_batch_size_has_no_meaning():
    variables = make_model().trainable_variables

    def refused(words, optimizer, batch_size=1):
        with pytest.raises(ValueError, match=words):
            apply(optimizer, ones(variables), variables, batch_size=batch_size)

    for kind in KINDS:
        local = hvd.DistributedOptimizer(kind(0.1))
        refused("batch_size=-1 is not a whole number", local, -1)
        local.register_local_var(variables[0])
        refused("pass scale_local_gradients=False", local)
        refused("batch_size weights averages", hvd.DistributedOptimizer(kind(0.1), op=hvd.Sum))
        twice = hvd.DistributedOptimizer(kind(0.1), backward_passes_per_step=2)
        refused("here those of several add up", twice)
        refused("here those of several add up", LossScaling(twice))


def test_backward_passes_add_up():
    for kind in KINDS:
        expected = reference(kind(0.1), passes=2)  # as many samples in one batch
        for average, rate in ((True, 0.1), (False, 0.05)):
            optimizer = hvd.DistributedOptimizer(
                kind(rate), backward_passes_per_step=2, average_aggregated_gradients=average
            )
            check_fit(optimizer, expected, STEPS // 2, graph=average)
            assert int(optimizer.iterations) == (STEPS if LEGACY else STEPS // 2)


def test_steps_that_overflow_on_one_rank_are_skipped_on_all():
    for kind in KINDS:
        plain, skipping = reference(kind(0.1)), reference(kind(0.1), data_without(2))
        for make in (
            lambda kind=kind: LossScaling(hvd.DistributedOptimizer(kind(0.1)), initial_scale=1024),
            lambda kind=kind: hvd.DistributedOptimizer(LossScaling(kind(0.1), initial_scale=1024)),
        ):
            check_fit(make(), plain)
            model, optimizer = make_model(), make()
            with exchanges() as count:
                fit(model, optimizer, *map(own, bad_data(np.inf)), BATCH, graph=True)
            assert len(count) == STEPS
            assert float(optimizer.loss_scale if LEGACY else optimizer.dynamic_scale) == 512
            assert LEGACY or int(optimizer.iterations) == STEPS - 1
            assert same_on_all_ranks([v.numpy() for v in variables_of(optimizer)])
            assert close(model.get_weights(), skipping)
        model = make_model()
        scaled = LossScaling(kind(0.05), initial_scale=1024)
        train(model, hvd.DistributedOptimizer(scaled, backward_passes_per_step=2))
        assert same_on_all_ranks(model.get_weights())
        assert close(model.get_weights(), reference(kind(0.1), passes=2))


def test_a_model_that_was_trained_before_its_optimizer_was_wrapped():
    x, y = data()
    # In batches of the size that follows: a compiled step would be used again.
    first = x[: BATCH * STEPS], y[: BATCH * STEPS], BATCH
    for kind in KINDS:
        expected, model = make_model(), make_model()
        for each in (expected, model):
            fit(each, kind(0.1, momentum=0.9), *first, graph=True)
        optimizer = hvd.DistributedOptimizer(model.optimizer)
        assert int(optimizer.iterations) == STEPS
        options = {"shuffle": False, "verbose": 0}
        with exchanges() as count:
            model.fit(own(x), own(y), batch_size=BATCH, **options)
        expected.fit(x, y, batch_size=BATCH * hvd.size(), **options)
        assert len(count) == STEPS
        assert close(model.get_weights(), expected.get_weights())


def test_momentum_is_corrected_when_the_rate_changes():
    """Compare with SGD in float64 whose velocity is scaled by new rate over old."""
    momentum, rates = 0.9, [0.1, 0.1, 0.2, 0.05]
    for kind, correction in [(kind, correction) for kind in KINDS for correction in (True, False)]:
        layer = keras.layers.Dense(1, use_bias=False)
        layer.build((None, 1))
        layer.kernel.assign([[0.0]])
        optimizer = built(hvd.DistributedOptimizer(kind(rates[0], momentum=momentum)), layer)
        callback = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: rates[int(epoch)], momentum_correction=correction
        )
        callback.set_model(type("Model", (), {"optimizer": optimizer})())
        weight, velocity, old = 0.0, 0.0, rates[0]
        for epoch, rate in enumerate(rates):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            apply(optimizer, ones(layer.trainable_variables), layer.trainable_variables)
            velocity = momentum * velocity * (rate / old if correction else 1) - rate
            weight, old = weight + velocity, rate
            assert abs(float(layer.kernel.numpy()[0, 0]) - weight) < 1e-6


def test_local_layers_are_not_exchanged():
    x, y = (each[: BATCH * hvd.size()] for each in data())
    for kind, scale in [(kind, scale) for kind in KINDS for scale in (True, False)]:
        start, model, alone, whole = (make_model() for _ in range(4))
        optimizer = hvd.PartialDistributedOptimizer(
            kind(0.1),
            local_layers=model.layers[0] if scale else frozenset(model.layers[:1]),
            scale_local_gradients=scale,
        )
        optimizer.register_local_var(model.layers[1].bias)
        fit(model, optimizer, own(x), own(y), BATCH, graph=scale)
        fit(alone, kind(0.1), own(x), own(y), BATCH)
        fit(whole, kind(0.1), x, y, BATCH * hvd.size())
        before, moved, solo = (each.get_weights() for each in (start, model, alone))
        part = hvd.size() if scale else 1
        for number in (0, 1, 3):
            step = before[number] + (solo[number] - before[number]) / part
            assert close([moved[number]], [step])
        assert close([moved[2]], [whole.get_weights()[2]])


def test_replicas_that_differ_are_refused():
    rank = hvd.rank()

    def weights(model, optimizer, callbacks=()):
        train(model, hvd.DistributedOptimizer(optimizer), callbacks=callbacks)
        return model.get_weights()

    def refused(model, optimizer):
        with pytest.raises(hvd.MismatchError) as caught:
            weights(model, optimizer)
        assert "HVDLITE_CHECK_RANKS=warn" in str(caught.value)
        return str(caught.value)

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for kind in KINDS:
        message = refused(make_model(seed=rank), kind(0.1))
        assert "first/kernel' is " in message
        assert "on rank 0, " in message
        assert "4 of 4 weights differ" in message
        assert "BroadcastGlobalVariablesCallback(0)" in message
        message = refused(make_model(), kind(0.25 + 0.25 * (rank == 1)))
        assert "the optimizer's learning_rate is 0.25 on rank" in message
        assert "0.5 on rank 1; make the same optimizer" in message
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5 + (rank == 1), 0.9)
        assert "'decay_steps': 6" in refused(make_model(), kind(decay))
        assert same_on_all_ranks(weights(make_model(seed=rank), kind(0.1), [broadcast]))
    # Variables built in the first batch are broadcast after it.
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    assert same_on_all_ranks(weights(model, KINDS[0](0.1), [broadcast]))


def test_replicas_that_part_are_found():
    """They are compared while they train, except where they may differ."""
    kind = KINDS[-1]

    class Change(keras.callbacks.Callback):
        def __init__(self, change):
            super().__init__()
            self.change = change

        def on_train_batch_end(self, number, logs=None):
            if number == 2 and hvd.rank() == 1:
                self.change(self.model)

    def lower_rate(model):
        model.optimizer.learning_rate = 0.0625

    def move_weight(model):
        weight = model.trainable_variables[2]
        weight.assign(weight + 1.0)

    def move_momentum(model):
        part = distributed_part(model.optimizer)
        (momentum,) = part._kept_for(model.trainable_variables[2]).values()
        momentum.assign(momentum + 1.0)

    def count_steps(model):
        model.optimizer.iterations.assign(100)

    decay = keras.optimizers.schedules.ExponentialDecay(0.125, 5, 0.9)
    for rate, change, words in (
        (0.125, lower_rate, "learning_rate is 0.125 on rank 0, 0.0625 on rank 1"),
        (decay, count_steps, "iterations is 3 on rank 0, 100 on rank 1"),
        (0.125, move_weight, "of the weight '"),
        (0.125, move_momentum, "arrays of the optimizer's state"),  # weights differ, too, by then
    ):
        optimizer = hvd.DistributedOptimizer(kind(rate, momentum=0.5))
        with pytest.raises(hvd.MismatchError) as caught:
            train(make_model(), optimizer, callbacks=[Change(change)])
        message = str(caught.value)
        assert words in message
        is_option = change in (lower_rate, count_steps)  # arrays are compared in several slices
        # The step after the change moves a weight by its momentum.
        last = "[234]" if change is move_momentum else "[23]"
        history = "3, apart in step 4" if is_option else f"{last}, apart in step [456]"
        assert re.search(rf"\(equal in step {history}\)", message), message
        assert ("MetricAverageCallback" in message) == is_option
    model = make_model()
    optimizer = hvd.PartialDistributedOptimizer(
        kind(0.125, momentum=0.5), local_layers=model.layers[-1]
    )
    train(model, optimizer, callbacks=[Change(move_weight)])
    assert not same_on_all_ranks(model.get_weights())


def test_several_steps_in_one_execution_and_a_broadcast():
    """Ranks compare replicas only after the broadcast."""
    if TORCH:  # where Keras makes one step in each
        return
    x, y = map(own, data())

    def train(model, callbacks):
        # Of Keras 3, the rate differs until the broadcast.
        legacy, adam = KINDS[0], keras.optimizers.Adam
        optimizer = legacy(0.02) if LEGACY else adam(0.01 * (hvd.rank() + 1))
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", steps_per_execution=3)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        assert same_on_all_ranks(model.get_weights())
        np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.02, rtol=1e-6)

    def unbuilt():
        keras.utils.set_random_seed(hvd.rank())
        return keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
    train(make_model(seed=hvd.rank()), [broadcast(1)])
    train(unbuilt(), [broadcast(1)])
    here = make_model()
    layers = [type(each).from_config(each.get_config()) for each in here.layers]
    on_another_rank = keras.Sequential(layers, name=here.name)
    train(here if hvd.rank() == 0 else on_another_rank, [broadcast(1)])
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


def test_what_was_adapted_to_other_data_is_the_roots_after_a_broadcast():
    rank, size, layers = hvd.rank(), hvd.size(), keras.layers
    x = np.random.default_rng(3).normal(size=(8 * size, 3)) * (1.0 + np.arange(8 * size)[:, None])
    x, y = x.astype(np.float32), x.sum(axis=1, keepdims=True).astype(np.float32)
    mine, roots = x[rank::size], x[::size].astype(np.float64)

    def adapted():
        layer = layers.Normalization()
        layer.adapt(mine)
        return layer

    # The second one has weights after its first batch.
    for inputs in ([keras.Input((3,))], []):
        model = keras.Sequential([*inputs, adapted(), layers.Dense(1, kernel_initializer="ones")])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)), "mse")
        if inputs:
            model.predict(x, verbose=0)  # compiles a function
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(mine, y[rank::size], batch_size=8, verbose=0, callbacks=[broadcast])
        normal = (x - roots.mean(axis=0)) / roots.std(axis=0)
        weight, bias = map(np.asarray, model.get_weights()[-2:])
        expected = normal @ weight + bias
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-4)
        if inputs:
            error = normal.sum(axis=1, keepdims=True) - y
            step = 0.125 * 2 * (normal.T @ error) / len(x)
            np.testing.assert_allclose(weight, 1.0 - step, rtol=1e-3)
    model = keras.Sequential([keras.Input((3,)), adapted()])
    model.compile("sgd", "mse")
    state = hvd.elastic.KerasState(model)
    state.sync()
    np.testing.assert_allclose(model.predict(x, verbose=0), normal, rtol=1e-4, atol=1e-4)


def test_words_and_limits_that_were_adapted_to_other_data_are_an_error():
    words = keras.layers.StringLookup()
    words.adapt([["some", "other"][hvd.rank() % 2]])
    limits = keras.layers.Discretization(num_bins=3)
    limits.adapt(np.arange(20.0) * (1 + hvd.rank()))
    for layer, kind in ((words, "StringLookup"), (limits, "Discretization")):
        inputs = keras.Input((1,), dtype="string" if layer is words else "float32")
        model = keras.Sequential([inputs, layer, keras.layers.Embedding(9, 1)])
        message = f"a {kind}, has found by adapt.. is . entries .* on rank 0, .* on rank 1"
        with pytest.raises(hvd.MismatchError, match=message):
            hvd.broadcast_global_variables(0, model=model)
        if layer is words:
            layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary()))
        else:
            layer.bin_boundaries = hvd.broadcast_object([*layer.bin_boundaries])
        hvd.broadcast_global_variables(0, model=model)


def test_what_is_made_from_a_distributed_optimizer_is_distributed():
    for kind in KINDS:
        check_copies(kind, make_model())


def check_copies(kind, model):
    optimizer = hvd.DistributedOptimizer(
        kind(0.1), hvd.Compression.fp16, op=hvd.Sum, backward_passes_per_step=2
    )
    train(model, optimizer)  # Keras copies no model whose optimizer is not built
    scaled = LossScaling(optimizer)

    def recompiled():
        clone = keras.models.clone_model(model)
        clone.compile_from_config(model.get_compile_config())
        return clone.optimizer

    ways = [
        lambda: type(optimizer).from_config(optimizer.get_config()),
        lambda: type(optimizer).from_config({"learning_rate": 0.5}),
        lambda: kind.from_config(copy.deepcopy(optimizer.get_config())),
        lambda: type(scaled).from_config(scaled.get_config()),
        lambda: keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        lambda: copy.deepcopy(model).optimizer,
        lambda: pickle.loads(pickle.dumps(model)).optimizer,
        recompiled,
    ]
    for make in ways:
        made = distributed_part(make())
        assert made is not optimizer
        assert isinstance(made, kind)
        assert made._hvdlite.options == optimizer._hvdlite.options
    with exchanges() as count:
        train(model, ways[0]())
    assert count
    assert same_on_all_ranks(model.get_weights())
    config = optimizer.get_config()
    model.compile(optimizer, "mse")
    optimizer.register_local_var(model.trainable_variables[0])
    for make in (*ways[:1], lambda: kind.from_config(config), lambda: copy.deepcopy(model)):
        with pytest.raises(ValueError, match="local layers or variables belongs to one model"):
            make()
    with pytest.raises(TypeError, match="save the model"):
        pickle.dumps(model)
    plain = kind.from_config({**config, "name": "plain"})
    assert distributed_part(plain) is None
    with exchanges() as count:
        train(model, plain)
    assert not count


def test_metrics_are_averaged_before_others_see_them():
    spy, before = Spy(), Spy()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(KINDS[-1](0.1))
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=EAGER, jit_compile=False)
    x, y = map(own, data(scale=1 + hvd.rank()))
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[before, hvd.callbacks.MetricAverageCallback(), spy],
    )
    everyone = hvd.allgather_object(before.logs)
    for epoch, logs in enumerate(spy.logs):
        assert set(logs) == {"loss", "mae", "val_loss", "val_mae"}
        for key, value in logs.items():
            values = [rank[epoch][key] for rank in everyone]
            assert len(set(values)) == hvd.size()
            assert abs(value - np.mean(values)) < 1e-6
            assert history.history[key][epoch] == value
    callback = hvd.callbacks.MetricAverageCallback()
    with pytest.raises(hvd.HorovodInternalError, match="'extra' is missing on ranks"):
        callback.on_epoch_end(0, {"loss": 1.0, **({"extra": 1.0} if hvd.rank() else {})})
    logs = {"loss": float(hvd.rank()), "parts": np.full(2, hvd.rank())}
    callback.on_epoch_end(0, logs)
    assert logs["loss"] == (hvd.size() - 1) / 2
    assert logs["parts"].tolist() == [(hvd.size() - 1) / 2] * 2


def test_learning_rates_follow_their_schedules():
    size = hvd.size()
    x, y = (array[: 3 * BATCH] for array in map(own, data()))

    def rates(*callbacks, epochs=4):
        spy = Spy()
        optimizer = hvd.DistributedOptimizer(KINDS[-1](0.5))
        fit(make_model(), optimizer, x, y, BATCH, epochs=epochs, callbacks=[*callbacks, spy])
        return spy.rates, [logs["lr"] for logs in spy.logs]

    found, logged = rates(hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_epochs=2), epochs=3)
    ramp = [0.3 * (1 + (step + 1) / 6 * (size - 1)) / size for step in range(6)]
    np.testing.assert_allclose(found, ramp + [0.3] * 3, rtol=1e-5)
    np.testing.assert_allclose(logged, [ramp[2], 0.3, 0.3], rtol=1e-5)
    schedule = hvd.callbacks.LearningRateScheduleCallback
    found, _ = rates(
        schedule(0.3, 1.0, end_epoch=1), schedule(0.3, lambda epoch: 0.1**epoch, start_epoch=2)
    )
    np.testing.assert_allclose(found, [0.3] * 6 + [0.003] * 3 + [0.0003] * 3, rtol=1e-5)
    found, _ = rates(schedule(0.3, lambda epoch: 1 + epoch, staircase=False, end_epoch=1))
    np.testing.assert_allclose(found, [0.3, 0.4, 0.5] + [0.5] * 9, rtol=1e-5)
    # A call of Keras for several batches has the rate of the last one; the end is never exceeded.
    for epochs, per_call, expected in ((1, 2, ramp[3::2]), (0.5, 3, [0.3])):
        callback = hvd.callbacks.LearningRateWarmupCallback(0.3, epochs, steps_per_epoch=3)
        optimizer = KINDS[-1](0.5)
        parts = {"optimizer": optimizer, "steps_per_execution": per_call}
        callback.set_model(type("Model", (), parts)())
        for batch, rate in zip(range(0, 3, per_call), expected, strict=True):
            callback.on_train_batch_begin(batch)
            np.testing.assert_allclose(float(optimizer.learning_rate), rate, rtol=1e-5)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.3)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        callback.on_train_begin()


def write_half(model, filepath, **options):
    Path(filepath).write_bytes(b"half")
    raise KeyboardInterrupt


def test_the_best_model_is_kept_by_rank_zero():
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp())) / str(hvd.rank())
    folder.mkdir()
    best, often = folder / "best.keras", folder / "often.keras"
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(best))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(KINDS[-1](0.05))
    callbacks = [hvd.callbacks.MetricAverageCallback(), callback]
    history = fit(model, optimizer, *map(own, data()), BATCH, epochs=2, callbacks=callbacks)
    assert [path.name for path in folder.iterdir()] == ([] if hvd.rank() else ["best.keras"])
    if hvd.rank() == 0:
        assert callback.best == min(history.history["loss"])
        keras.models.load_model(best)
        assert callback.model is model
        # A death in the middle of writing leaves the old file.
        before = best.read_bytes()
        callback.best = float("inf")
        with patch.object(type(model), "save", write_half), pytest.raises(KeyboardInterrupt):
            callback.on_epoch_end(2, {"loss": 0.0})
        assert best.read_bytes() == before
        assert [path.name for path in folder.iterdir()] == ["best.keras"]
    callback = hvd.callbacks.BestModelCheckpoint("loss", save_freq=1, filepath=often)
    fit(model, optimizer, *map(own, data()), BATCH, callbacks=[callback])
    assert often.exists() == (hvd.rank() == 0)
    with pytest.raises(ValueError, match="no path"):
        hvd.callbacks.BestModelCheckpoint().on_train_begin()
