"""Test graphs and models that are loaded in another process than the one that made them."""

import sys
import warnings
import weakref

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf
from tensorflow.python.ops import script_ops

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import close, equal, reduced

VECTOR = [tf.TensorSpec([3], tf.float32)]


class Exchanging(tf.Module):
    """A module with exchanges in the forward pass, in a branch of the graph, and of gradients."""

    def __init__(self):
        self.weight = tf.Variable(tf.ones(3))

    @tf.function(input_signature=VECTOR)
    def sum(self, x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function(input_signature=VECTOR)
    def branch(self, x):
        return tf.cond(x[0] > 0, lambda: hvd.broadcast(x, 0), lambda: x)

    @tf.function(input_signature=VECTOR)
    def train(self, x):
        return reduced(lambda: tf.reduce_sum(self.weight * x), self.weight)


class Users(tf.Module):
    @tf.function(input_signature=VECTOR)
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda x: x + 1, [x], tf.float32), [3])


KERAS_NAME = "hvdlite>SyncBatchNormalization"
CALLS = ("sum", "branch", "train")


@ranks(1)
def test_exported_graphs_call_no_function_but_their_own(tmp_path, monkeypatch):
    hvd.init()
    ours, users, x = Exchanging(), Users(), tf.ones(3)
    for module, calls in ((ours, CALLS), (users, ["call"])):
        for call in calls:
            getattr(module, call)(x)
        tf.saved_model.save(module, tmp_path / type(module).__name__)
    here = tf.saved_model.load(tmp_path / "Exchanging")
    for call in CALLS:
        assert equal(getattr(here, call)(x), [1, 1, 1])

    # Another process counts its Python functions from 0 again.
    monkeypatch.setattr(script_ops._py_funcs, "_funcs", weakref.WeakValueDictionary())
    monkeypatch.setattr(script_ops._py_funcs, "_unique_id", 0)
    called = []

    @tf.function
    def another(x):
        for _ in range(6):
            called.append(tf.numpy_function(lambda x: x * 1000, [x], tf.float32))
        return tf.add_n(called)

    assert equal(another(x), [6000.0] * 3)
    there = tf.saved_model.load(tmp_path / "Exchanging")
    for call in CALLS:
        with pytest.raises(tf.errors.InvalidArgumentError, match="build the model from its code"):
            getattr(there, call)(x)
    assert equal(tf.saved_model.load(tmp_path / "Exchanging").branch(-x), [-1, -1, -1])

    # A user's graph calls by number: none may be one of hvdlite's.
    monkeypatch.setattr(script_ops._py_funcs, "_funcs", weakref.WeakValueDictionary())
    monkeypatch.setattr(script_ops._py_funcs, "_unique_id", 0)
    functions = [tf.function(lambda x, n=n: hvd.allreduce(x, prescale_factor=n)) for n in range(6)]
    for number, function in enumerate(functions):
        assert equal(function(x), [number] * 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Could not find callback"):
        tf.saved_model.load(tmp_path / "Users").call(x)


@ranks(1)
def test_models_with_synchronized_batches_leave_without_hvdlite(tmp_path, monkeypatch):
    """Inference contains no exchange, and the layer's configuration is that of Keras."""
    hvd.init()
    options = {"momentum": 0.5, "epsilon": 0.01, "center": False}
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(**options)])
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    model(x, training=True)
    expected = model(x, training=False)
    assert not close(expected, x)

    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    assert close(exported.serve(x), expected, 1e-6)
    operations = exported.signatures["serving_default"].graph.as_graph_def(add_shapes=False)
    nodes = [*operations.node, *(n for f in operations.library.function for n in f.node_def)]
    assert "PyFunc" not in {node.op for node in nodes}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Keras, on how numpy is called
        model.save(tmp_path / "model.keras")
        here = keras.saving.load_model(tmp_path / "model.keras")
        # As in a process without hvdlite:
        monkeypatch.delitem(keras.saving.get_custom_objects(), KERAS_NAME)
        monkeypatch.setitem(sys.modules, "hvdlite.tensorflow.sync_batch_norm", None)
        stand_in = type("SyncBatchNormalization", (keras.layers.BatchNormalization,), {})
        plain = keras.saving.load_model(
            tmp_path / "model.keras", custom_objects={KERAS_NAME: stand_in}
        )
    for again, kind in ((here, hvd.SyncBatchNormalization), (plain, stand_in)):
        assert type(again.layers[0]) is kind
        assert close(again(x, training=False), expected, 1e-6)

    tf.train.Checkpoint(model).write(tmp_path / "checkpoint")
    again = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(**options)])
    tf.train.Checkpoint(again).read(tmp_path / "checkpoint").assert_existing_objects_matched()
    assert close(again(x, training=False), expected, 1e-6)
