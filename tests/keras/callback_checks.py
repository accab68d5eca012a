"""Test callbacks, saved models and values with Keras 3 on any framework."""

import json
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
from tests.keras import close, exchanges, same_on_all_ranks
from tests.keras.models import BATCH, STEPS, TORCH, Spy, data, fit, make_model, own
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
    with zipfile.ZipFile(path) as archive:
        assert not any(b"hvdlite" in archive.read(name) for name in archive.namelist())
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


def test_weights_that_part_without_an_exchange_are_reported():
    class Apart(keras.Sequential):
        def train_step(self, *_):
            for weight in self.trainable_weights[1:2]:
                weight.assign(weight + hvd.rank())
            return {"loss": keras.ops.zeros(())}

    x, y = map(own, data())
    for is_local, told in ((False, hvd.rank() == 0), (True, 0)):
        model = Apart([keras.Input((5,)), keras.layers.Dense(1, name="only")])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", run_eagerly=True, jit_compile=False)
        local = model.trainable_weights[1:] if is_local else None
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
        with logged() as messages:
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[broadcast])
        found = [each for each in messages if "updates them exchanges nothing" in each]
        assert len(found) == told
        assert all("1 of the model's trainable weights differ" in each for each in found)
        assert all("only/bias': what updates" in each for each in found)


def test_optimizers_that_differ_are_refused_before_the_broadcast():
    is_first = hvd.rank() == 0
    for is_wrapped, steps, words in (
        (is_first, None, "DistributedOptimizer is True on rank 0, False on rank 1"),
        (True, None if is_first else 2, r"its variables is \d+ on rank 0, \d+ on rank 1"),
    ):
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        if is_wrapped:
            hvd.DistributedOptimizer(optimizer)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model = make_model()
        with pytest.raises(hvd.MismatchError, match=words):
            fit(model, optimizer, *map(own, data()), BATCH, callbacks=[broadcast])


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
