"""Test compression in tapes and Keras optimizers: state, weighted averages, users' classes."""

import gc

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.compression import Compression, ErrorFeedback
from hvdlite.tensorflow.exchange_state import _states, exchange_state
from tests.tensorflow.modes import close, each_mode, in_mode

SHAPE = (6, 5)


def new_world():
    hvd.shutdown()
    hvd.init()


def gradient(step, rank):
    return np.random.default_rng([step, rank]).standard_normal(SHAPE).astype(np.float32)


def stepper(variable, mode, **options):
    """Return a descent step on ``sum(variable * given)``, whose gradient is ``given``."""

    def step(given, batch_size=None):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * given)
        tape = hvd.DistributedGradientTape(tape, **options)
        (found,) = tape.gradient(loss, [variable], batch_size=batch_size)
        variable.assign_sub(found)

    return in_mode(mode, step)


@each_mode
@ranks(2)
def test_nothing_is_lost(mode):
    """Check this over several steps, each rank's checkpoint, and one that rank 0 saves for all."""
    new_world()
    options = {"compression": ErrorFeedback(Compression.bf16)}
    variable, size = tf.Variable(tf.zeros(SHAPE), name="w"), hvd.size()
    step = stepper(variable, mode, **options)
    for number in range(6):
        if number in (2, 4):
            if number == 4:
                hvd.consolidate_exchange_state([variable])
                saved = hvd.broadcast_object(hvd.exchange_state_dict([variable]), size - 1)
                assert saved["compression"]["rank"] == -1
            else:
                saved = hvd.exchange_state_dict([variable])
            new_world()
            variable = tf.Variable(variable, name="w")
            assert not hvd.exchange_state_dict([variable])
            hvd.load_exchange_state_dict([variable], saved)
            step = stepper(variable, mode, **options)
        step(gradient(number, hvd.rank()))
    left = hvd.exchange_state_dict([variable])["compression"]["parameters"]["w"]["residual"]
    left = hvd.allreduce(tf.constant(left, tf.float64))
    everything = [[gradient(number, rank) for rank in range(size)] for number in range(6)]
    expected = np.sum(np.mean(np.float64(everything), axis=1), axis=0)
    assert close(left - tf.cast(variable, tf.float64), expected, 1e-5)


@ranks(1)
def test_variables_of_one_name_have_memories_of_their_own():
    new_world()
    first, second = (tf.Variable(tf.zeros(SHAPE), name="w") for _ in range(2))
    options = {"compression": ErrorFeedback(Compression.bf16)}
    stepper(first, "eager", **options)(gradient(0, 0))
    assert hvd.exchange_state_dict([first])
    assert not hvd.exchange_state_dict([second])


@ranks(2)
def test_a_rank_outside_the_process_set_remembers_nothing():
    hvd.init()
    first, variable = hvd.add_process_set([0]), tf.Variable(0.0)
    try:
        state = exchange_state([variable])
        state.consolidate(first)
        assert not state.state_dict(first)
    finally:
        hvd.remove_process_set(first)


@ranks(1)
def test_what_is_remembered_is_forgotten_with_any_of_the_variables():
    """A new variable may have the identity of one that has been freed."""
    hvd.init()
    first, second = tf.Variable(0.0), tf.Variable(0.0)
    before = len(_states)
    assert exchange_state([first, second]) is exchange_state([first, second])
    assert len(_states) == before + 1
    del second
    gc.collect()
    assert len(_states) == before


@ranks(1)
def test_what_does_not_last_cannot_be_remembered():
    new_world()
    constant = tf.ones(SHAPE)
    with tf.GradientTape() as tape:
        tape.watch(constant)
        loss = tf.reduce_sum(constant)
    tape = hvd.DistributedGradientTape(tape, compression=ErrorFeedback(Compression.fp16))
    with pytest.raises(ValueError, match="sources have to be variables"):
        tape.gradient(loss, [constant])


@each_mode
@ranks(2)
def test_uneven_batches_give_the_gradient_of_their_union(mode):
    new_world()
    variable, size = tf.Variable(tf.zeros(SHAPE), name="w"), hvd.size()
    step = stepper(variable, mode)
    expected = np.zeros(SHAPE)
    for number in range(3):
        sizes = [1 + (3 * rank + number) % 4 for rank in range(size)]
        step(gradient(number, hvd.rank()), tf.constant(sizes[hvd.rank()]))
        weighted = [n * gradient(number, rank) for rank, n in enumerate(sizes)]
        expected -= np.sum(np.float64(weighted), axis=0) / sum(sizes)
    assert close(variable, expected, 1e-5)


class Halved:
    """A compression class as users of Horovod write it."""

    @staticmethod
    def compress(tensor):
        assert isinstance(tensor, tf.Tensor)
        return tf.cast(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor, ctx)


@ranks(1)
def test_where_batch_size_has_no_meaning():
    new_world()
    variable = tf.Variable(tf.zeros(SHAPE), name="w")
    for given in (-1, 2.5, "3", float("nan"), tf.constant(2.5), tf.constant([2])):
        with pytest.raises(ValueError, match=r"batch_size=.* is not a whole number from 0 on"):
            stepper(variable, "eager")(tf.ones(SHAPE), given)
    with pytest.raises(ValueError, match="expected a scalar of an integer type"):
        stepper(variable, "function")(tf.ones(SHAPE), tf.constant(2.5))
    with pytest.raises(tf.errors.OpError, match=r"batch_size=.*-1.* is not a whole number"):
        stepper(variable, "function")(tf.ones(SHAPE), tf.constant(-1))
    for op in (hvd.Sum, hvd.Adasum):
        with pytest.raises(ValueError, match="batch_size weights averages"):
            stepper(variable, "eager", op=op)(tf.ones(SHAPE), 2)
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(variable)
    tape = hvd.DistributedGradientTape(recorded)
    tape.register_local_source(variable)
    with pytest.raises(ValueError, match="pass scale_local_gradients=False"):
        tape.gradient(loss, [variable], batch_size=2)


@each_mode
@ranks(2)
def test_a_class_with_compress_and_decompress(mode):
    new_world()
    variable, size = tf.Variable(tf.zeros(SHAPE), name="w"), hvd.size()
    stepper(variable, mode, compression=Halved)(gradient(0, hvd.rank()))
    expected = np.mean([gradient(0, rank) for rank in range(size)], axis=0)
    assert close(-variable, expected, 5e-3)
    assert not close(-variable, expected, 1e-7)
    total = in_mode(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, compression=Halved))(tf.ones(3))
    assert close(total, [size] * 3)


@ranks(2)
def test_a_keras_optimizer_remembers():
    import keras

    new_world()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    compression = ErrorFeedback(Compression.bf16)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
    model.compile(optimizer, "mse")
    draw = np.random.default_rng(hvd.rank()).standard_normal
    model.fit(draw((16, 4)), draw((16, 3)), batch_size=8, verbose=0)
    saved = optimizer.exchange_state_dict()["compression"]
    assert saved["rank"] == hvd.rank()
    assert all(int(entry["exchanges"]) == 2 for entry in saved["parameters"].values())
    assert all(entry["residual"].any() for entry in saved["parameters"].values())
    optimizer.consolidate_exchange_state()
    common = optimizer.exchange_state_dict()["compression"]
    gathered = hvd.allgather_object([e["residual"] for e in common["parameters"].values()])
    for first, second in zip(*gathered, strict=True):
        np.testing.assert_array_equal(first, second)
    optimizer.load_exchange_state_dict({"compression": saved})
    assert optimizer.exchange_state_dict()["compression"]["rank"] == hvd.rank()
