"""Test callbacks, saved models and values with Keras 3 on any framework."""

import json
import subprocess
import sys
import tempfile
import warnings
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import keras
import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.keras import _keras3
from tests.keras.measures import (
    check_normalization,
    check_words_and_limits,
    close,
    exchanges,
    same_on_all_ranks,
)
from tests.keras.models import BATCH, EAGER, STEPS, TORCH, data, fit, make_model, own
from tests.logs import logged


def traced_only():
    """Have torch.compile trace the steps, and compile nothing, which takes a minute."""
    if not TORCH:
        return nullcontext()
    import torch

    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


def make_layer():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.set_weights([np.full(weight.shape, 0.5) for weight in model.get_weights()])
    return model


def test_steps_are_compiled_without_xla():
    # torch.compile follows Keras through each layer of each step, for seconds.
    steps, make = (2, make_layer) if TORCH else (STEPS, make_model)
    # It compiles all of Adam's update, where it would find Keras' own methods.
    kind = keras.optimizers.Adam if TORCH else keras.optimizers.SGD
    x, y = (each[: BATCH * steps * hvd.size()] for each in data())
    plain = make()
    fit(plain, kind(0.1), x, y, BATCH * hvd.size())
    _keras3._warn_that_xla_is_off.cache_clear()  # an earlier test may have heard it
    with logged() as messages:
        for jit in (True,) if TORCH else ("auto", True):  # with PyTorch both are compiled
            model = make()
            optimizer = hvd.DistributedOptimizer(kind(0.1))
            with exchanges() as count, warnings.catch_warnings(), traced_only():
                warnings.simplefilter("ignore")  # of torch.compile
                fit(model, optimizer, own(x), own(y), BATCH, jit_compile=jit)
            assert len(count) == steps
            assert close(model.get_weights(), plain.get_weights())
        assert model.jit_compile
    words = [message for message in messages if "without XLA" in message]
    assert len(words) == (0 if TORCH or hvd.rank() else 1)


def test_saved_models_know_nothing_of_hvdlite():
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    path = folder / f"model-{hvd.rank()}.keras"
    wrapped, plain = make_model(), make_model()
    fit(wrapped, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), *map(own, data()), BATCH)
    fit(plain, keras.optimizers.Adam(0.05), *data(), BATCH * hvd.size())
    wrapped.save(path)
    plain.save(folder / f"plain-{hvd.rank()}.keras")
    assert optimizer_config(path) == optimizer_config(folder / f"plain-{hvd.rank()}.keras")
    if hvd.rank() == 0:
        code = (
            "import sys; sys.modules['hvdlite'] = None; import keras;"
            f"model = keras.saving.load_model({str(path)!r});"
            "print(type(model.optimizer).__name__, int(model.optimizer.iterations.numpy()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.split() == ["Adam", str(STEPS)], done.stderr
    loaded = hvd.load_model(path)
    x, y = data()
    options = {"shuffle": False, "verbose": 0}
    with exchanges() as count:
        loaded.fit(own(x), own(y), batch_size=BATCH, **options)
    assert len(count) == STEPS
    plain.fit(x, y, batch_size=BATCH * hvd.size(), **options)
    assert close(loaded.get_weights(), plain.get_weights())


def test_a_loaded_model_that_exchanges_nothing_is_reported():
    path = Path(hvd.broadcast_object(tempfile.mkdtemp())) / f"model-{hvd.rank()}.keras"
    model = make_model()
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), *map(own, data()), BATCH)
    model.save(path)
    with logged() as messages:
        for load, told in ((hvd.load_model, 0), (keras.saving.load_model, hvd.rank() == 0)):
            loaded = load(path)
            broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            x, y = map(own, data())
            loaded.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[broadcast])
            found = [each for each in messages if "each rank trains by itself" in each]
            assert len(found) == told
    assert all("hvd.load_model(path)" in each for each in found)


def optimizer_config(path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    found = config["compile_config"]["optimizer"]
    found["config"].pop("name")
    return found


def test_custom_optimizers_are_saved_by_their_registered_name():
    @keras.saving.register_keras_serializable("somewhere")
    class Own(keras.optimizers.SGD):
        pass

    plain = keras.saving.serialize_keras_object(Own(0.1, name="own"))
    wrapped = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(Own(0.1, name="own")))
    assert wrapped == plain
    assert wrapped["registered_name"] == "somewhere>Own"
    copy = type(hvd.DistributedOptimizer(Own(0.1))).from_config({"learning_rate": 0.5})
    assert isinstance(copy, Own)
    assert keras.saving.serialize_keras_object(copy)["registered_name"] == "somewhere>Own"


def test_a_rate_that_follows_each_ranks_own_loss_is_found():
    x, y = map(own, data(scale=1 + 9 * hvd.rank()))
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=1.0 if hvd.rank() else 1e-9
    )
    options = {"epochs": 8, "callbacks": [plateau]}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0625))
    with pytest.raises(hvd.MismatchError, match=r"learning_rate is .*MetricAverageCallback"):
        fit(make_model(), optimizer, x, y, BATCH, **options)
    averages = hvd.callbacks.MetricAverageCallback()
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1.0)
    options["callbacks"] = [averages, plateau]
    model, optimizer = make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.0625))
    fit(model, optimizer, x, y, BATCH, **options)
    assert same_on_all_ranks(model.get_weights())


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


def test_variables_are_broadcast_before_the_first_update():
    for built in (True, False):
        model = make_model(seed=hvd.rank())
        if not built:  # until the first batch
            model = keras.Sequential(
                [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
            )
        keras.utils.set_random_seed(hvd.rank())
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (hvd.rank() + 1)))
        spy = Spy()
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1), spy]
        fit(model, optimizer, *map(own, data()), BATCH, callbacks=callbacks)
        assert all(spy.same), spy.same
        np.testing.assert_allclose(spy.rates, 0.01 * hvd.size(), rtol=1e-6)
        assert same_on_all_ranks([hvd.allreduce(v, op=hvd.Sum) for v in optimizer.variables])


def test_gradients_that_wait_for_another_fit_are_not_broadcast():
    def train(optimizer, x, y, batch, callbacks):
        model = make_model()
        for rows in (slice(batch), slice(batch, 2 * batch)):
            fit(model, optimizer, x[rows], y[rows], batch, callbacks=callbacks)
        return model.get_weights()

    def one(wrap):
        return wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

    def several(wrap):
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(one(wrap)))

    for make in (one, *([several] if hasattr(keras.optimizers, "MultiOptimizer") else [])):
        expected = train(make(lambda each: each), *data(), BATCH * hvd.size(), [])
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        found = train(make(hvd.DistributedOptimizer), *map(own, data()), BATCH, [broadcast])
        assert close(found, expected)


def test_callbacks_serve_one_model_after_the_other():
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.125, warmup_epochs=1)
    for steps in (2, 4):
        model, spy = make_model(seed=hvd.rank()), Spy()
        x, y = (array[: steps * BATCH] for array in map(own, data()))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        fit(model, optimizer, x, y, BATCH, epochs=2, callbacks=[broadcast, warmup, spy])
        assert all(spy.same)
        size = hvd.size()
        ramp = [0.125 * (1 + (step + 1) / steps * (size - 1)) / size for step in range(steps)]
        np.testing.assert_allclose(spy.rates, [*ramp, *[0.125] * steps], rtol=1e-5)


def test_metrics_are_averaged_before_others_see_them():
    spy, before = Spy(), Spy()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
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
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
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
        optimizer = keras.optimizers.SGD(0.5)
        parts = {"optimizer": optimizer, "steps_per_execution": per_call}
        callback.set_model(type("Model", (), parts)())
        for batch, rate in zip(range(0, 3, per_call), expected, strict=True):
            callback.on_train_batch_begin(batch)
            np.testing.assert_allclose(float(optimizer.learning_rate), rate, rtol=1e-5)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.3)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        callback.on_train_begin()


def test_momentum_is_corrected_when_the_rate_changes():
    """Compare with SGD in float64 whose velocity is scaled by new rate over old."""
    gradient, momentum, rates = 1.0, 0.9, [0.1, 0.1, 0.2, 0.05]
    for correction in (True, False):
        layer = keras.layers.Dense(1, use_bias=False)
        layer.build((None, 1))
        layer.kernel.assign([[0.0]])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rates[0], momentum=momentum))
        optimizer.build(layer.trainable_variables)
        callback = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: rates[int(epoch)], momentum_correction=correction
        )
        callback.set_model(type("Model", (), {"optimizer": optimizer})())
        weight, velocity, old = 0.0, 0.0, rates[0]
        for epoch, rate in enumerate(rates):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            optimizer.apply([keras.ops.ones((1, 1))], layer.trainable_variables)
            velocity = momentum * velocity * (rate / old if correction else 1) - rate * gradient
            weight, old = weight + velocity, rate
            assert abs(float(layer.kernel.numpy()[0, 0]) - weight) < 1e-6


def write_half(model, filepath, **options):
    Path(filepath).write_bytes(b"half")
    raise KeyboardInterrupt


def test_the_best_model_is_kept_by_rank_zero():
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp())) / str(hvd.rank())
    folder.mkdir()
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=folder / "best.keras")
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    callbacks = [hvd.callbacks.MetricAverageCallback(), callback]
    history = fit(model, optimizer, *map(own, data()), BATCH, epochs=2, callbacks=callbacks)
    assert [path.name for path in folder.iterdir()] == ([] if hvd.rank() else ["best.keras"])
    if hvd.rank() == 0:
        assert callback.best == min(history.history["loss"])
        keras.saving.load_model(folder / "best.keras")
        assert callback.model is model
        # A death in the middle of writing leaves the old file.
        before = (folder / "best.keras").read_bytes()
        callback.best = float("inf")
        with patch.object(type(model), "save", write_half), pytest.raises(KeyboardInterrupt):
            callback.on_epoch_end(2, {"loss": 0.0})
        assert (folder / "best.keras").read_bytes() == before
        assert [path.name for path in folder.iterdir()] == ["best.keras"]
    often = hvd.callbacks.BestModelCheckpoint("loss", save_freq=1, filepath=folder / "often.keras")
    fit(model, optimizer, *map(own, data()), BATCH, callbacks=[often])
    assert (folder / "often.keras").exists() == (hvd.rank() == 0)
    with pytest.raises(ValueError, match="no path"):
        hvd.callbacks.BestModelCheckpoint().on_train_begin()


def test_values():
    size, rank = hvd.size(), hvd.rank()
    assert hvd.allreduce(float(rank)) == (size - 1) / 2
    assert hvd.allreduce(rank, op=hvd.Sum) == size * (size - 1) // 2
    tensor = keras.ops.full((2,), float(rank))
    assert (
        hvd.allreduce(tensor, op=hvd.Max, postscale_factor=2.0).tolist() == [2.0 * (size - 1)] * 2
    )
    variable = keras.Variable(np.full((1, 2), rank, np.float32))
    assert hvd.allgather(variable).tolist() == [[float(each)] * 2 for each in range(size)]
    assert hvd.broadcast([rank, 7], root_rank=size - 1).tolist() == [size - 1, 7]
    narrow = keras.ops.cast(keras.ops.ones((2,)), "bfloat16")
    assert hvd.allreduce(narrow, op=hvd.Sum).astype(float).tolist() == [float(size)] * 2
    rows = hvd.reducescatter(np.arange(size + 1.0) * (rank + 1), op=hvd.Sum)
    factor = size * (size + 1) / 2
    expected = [0.0, factor] if rank == 0 else [factor * (rank + 1)]
    np.testing.assert_allclose(rows, expected)
    with pytest.raises(ValueError, match="not a registered process set"):
        hvd.allreduce(1.0, process_set=object())
    with pytest.raises(ValueError, match="pass broadcast_global_variables"):
        hvd.broadcast_global_variables(0)
    model = make_model(seed=rank)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (1 + rank))))
    hvd.broadcast_global_variables(0, model=model)
    assert same_on_all_ranks(model.get_weights())
    assert abs(hvd.allreduce(model.optimizer.learning_rate, op=hvd.Max) - 0.1) < 1e-6


def test_process_sets():
    rank = hvd.rank()
    last = hvd.add_process_set([hvd.size() - 1])
    model = make_model(seed=0)  # on all ranks: Keras numbers its layers
    try:
        if last.included():
            assert hvd.allreduce(rank, op=hvd.Sum, process_set=last) == rank
            model.compile(
                hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=last), loss="mse"
            )
            before = model.get_weights()
            model.train_on_batch(*[np.ones((4, *shape[1:])) for shape in shapes_of(model)])
            assert not all(map(np.array_equal, before, model.get_weights()))
        else:
            with pytest.raises(ValueError, match="is not in ProcessSet"):
                hvd.allreduce(rank, process_set=last)
            # As in Horovod, this rank trains by itself.
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=last)
            weight = keras.Variable([1.0])
            with exchanges() as count:
                optimizer.apply([keras.ops.convert_to_tensor([2.0])], [weight])
                optimizer.consolidate_exchange_state()
                optimizer.average_weights()
            assert not count
            # As a rank of the set has saved it.
            parameters = {"weight": {"residual": np.ones(1, np.float32)}}
            saved = {"compression": {"rank": 0, "size": 1, "parameters": parameters}}
            optimizer.load_exchange_state_dict(saved)
            assert not optimizer.exchange_state_dict()
            assert np.allclose(keras.ops.convert_to_numpy(weight), [0.8])
    finally:
        hvd.remove_process_set(last)


def shapes_of(model):
    return [(None, *model.inputs[0].shape[1:]), (None, *model.outputs[0].shape[1:])]


def test_what_was_adapted_to_other_data_is_the_roots_after_a_broadcast():
    check_normalization(hvd, keras)


def test_words_and_limits_that_were_adapted_to_other_data_are_an_error():
    check_words_and_limits(hvd, keras)
