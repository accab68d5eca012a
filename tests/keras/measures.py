"""Helpers that count exchanges and compare ranks."""

import contextlib
import copy
import pickle
import re

import numpy as np
import pytest

import hvdlite
from hvdlite import collectives
from hvdlite.engine import runtime
from hvdlite.keras._optimizer import distributed_part
from tests.logs import logged


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
    hvdlite.shutdown()
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDLITE_NOT_FINITE", reaction)
        try:
            hvdlite.init()
            yield told
        finally:
            hvdlite.shutdown()
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
    # Variables built in the first batch are broadcast after it.
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    assert same_on_all_ranks(train(model, kinds[0](0.1), [broadcast]))


def check_drift(hvd, keras, kind, make_model, fit, x, y, batch):
    """Check that replicas are compared while they train, except where they may differ.

    Args:
        hvd: The adapter.
        keras: The Keras that it is for.
        kind: A class of optimizers that have momentum.
        make_model: Returns a model.
        fit: Trains a model with an optimizer, ``x``, ``y``, ``batch`` and callbacks, in six steps.
        x: This rank's inputs.
        y: Their targets.
        batch: Samples in a batch.
    """

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

    def train(optimizer, change, wrap=hvd.DistributedOptimizer, **options):
        model = make_model()
        fit(model, wrap(optimizer, **options), x, y, batch, callbacks=[Change(change)])
        return model

    decay = keras.optimizers.schedules.ExponentialDecay(0.125, 5, 0.9)
    for rate, change, words in (
        (0.125, lower_rate, "learning_rate is 0.125 on rank 0, 0.0625 on rank 1"),
        (decay, count_steps, "iterations is 3 on rank 0, 100 on rank 1"),
        (0.125, move_weight, "of the weight '"),
        (0.125, move_momentum, "arrays of the optimizer's state"),  # weights differ, too, by then
    ):
        with pytest.raises(hvd.MismatchError) as caught:
            train(kind(rate, momentum=0.5), change)
        message = str(caught.value)
        assert words in message
        is_option = change in (lower_rate, count_steps)  # arrays are compared in several slices
        # The step after the change moves a weight by its momentum.
        last = "[234]" if change is move_momentum else "[23]"
        history = "3, apart in step 4" if is_option else f"{last}, apart in step [456]"
        assert re.search(rf"\(equal in step {history}\)", message), message
        assert ("MetricAverageCallback" in message) == is_option
    train(kind(0.125, momentum=0.5), lambda model: None, backward_passes_per_step=2)
    model = make_model()
    optimizer = hvd.PartialDistributedOptimizer(
        kind(0.125, momentum=0.5), local_layers=model.layers[-1]
    )
    fit(model, optimizer, x, y, batch, callbacks=[Change(move_weight)])
    assert not same_on_all_ranks(model.get_weights())


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


def check_normalization(hvd, keras):
    """Check that ranks normalize alike that have adapted to other data, after a broadcast."""
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


def check_words_and_limits(hvd, keras):
    """Check that words and limits that layers have found by adapt() must be the same."""
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


def check_copies(hvd, keras, kind, scaling, model, fit):
    """Check that whatever Keras makes from a distributed optimizer is distributed in the same way.

    Args:
        hvd: The adapter.
        keras: The Keras that it is for.
        kind: A class of optimizers.
        scaling: The class of its loss scaling optimizers.
        model: A built model.
        fit: Trains a model with an optimizer.
    """
    optimizer = hvd.DistributedOptimizer(
        kind(0.1), hvd.Compression.fp16, op=hvd.Sum, backward_passes_per_step=2
    )
    fit(model, optimizer)  # Keras copies no model whose optimizer is not built
    scaled = scaling(optimizer)

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
        fit(model, ways[0]())
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
        fit(model, plain)
    assert not count
