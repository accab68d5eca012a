import contextlib
import gc

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.tensorflow import exchange_state
from tests.keras import exchanges, same_on_all_ranks
from tests.schedule import models
from tests.schedule.models import MOMENTUM, RATE, SHAPES
from tests.tensorflow import test_tape as tapes
from tests.tensorflow.modes import each_mode, in_mode

CASES = {
    "post-local": (
        hvd.Schedule.LocalSGD(every=2, start=3),
        lambda size: models.local_sgd(size, 7, 2, 3),
    ),
    "diloco": (hvd.Schedule.DiLoCo(every=3), lambda size: models.diloco(size, 7, 3, 0.7, 0.9)),
}
SHAPE = (6, 5)


def gradient(step, rank):
    return np.random.default_rng([step, rank]).standard_normal(SHAPE).astype(np.float32)


class Training:
    """The same as `models.Replica`, in TensorFlow."""

    def __init__(self, schedule, mode="eager", **options):
        self.weights = {
            name: tf.Variable(weight, name=name) for name, weight in models.start().items()
        }
        self.velocity = {
            name: tf.Variable(tf.zeros_like(weight)) for name, weight in self.weights.items()
        }
        self.options = {"schedule": schedule, **options}
        self.done = 0
        self.mode = mode
        self.call = in_mode(mode, self.step_on)

    def step_on(self, noise):
        with tf.GradientTape() as inner:
            loss = tf.add_n(
                [
                    tf.reduce_sum(0.15 * weight**2 + noise[name] * weight)
                    for name, weight in self.weights.items()
                ]
            )
        tape = hvd.DistributedGradientTape(inner, **self.options)
        for name, own in tape.gradient(loss, self.weights).items():
            velocity = self.velocity[name]
            velocity.assign(MOMENTUM * velocity + own)
            self.weights[name].assign_sub(RATE * velocity)
        tape.end_step()

    def run(self, steps):
        for _ in range(steps):
            noise = {n: models.gradient(n, 0.0, hvd.rank(), self.done) for n in SHAPES}
            self.call({name: tf.constant(each) for name, each in noise.items()})
            self.done += 1

    def values(self):
        return [self.weights[name].numpy() for name in SHAPES]


def assert_as(training, expected):
    for name in SHAPES:
        for own, other in (
            (training.weights, expected.weights),
            (training.velocity, expected.velocity),
        ):
            np.testing.assert_allclose(own[name].numpy(), other[name], 1e-10, 1e-12)


@ranks(2)
@each_mode
@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_papers_say(size, mode, case):
    hvd.init()
    schedule, reference = CASES[case]
    training = Training(schedule, mode)
    training.run(7)
    assert_as(training, reference(size)[hvd.rank()])


@ranks(2)
@each_mode
def test_local_steps_exchange_nothing(mode):
    hvd.init()
    training = Training(hvd.Schedule.LocalSGD(every=2), mode)
    training.run(1)
    training.run(1)
    with exchanges() as count:
        training.run(1)
    assert not count
    with exchanges() as count:
        training.run(1)
    assert any("bucket" in name for name in count)


@ranks(2)
@each_mode
def test_a_step_that_does_not_end_is_noticed_in_the_next(mode):
    hvd.init()
    weight = tf.Variable([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        tape = hvd.DistributedGradientTape(tape, schedule=hvd.Schedule.LocalSGD(every=2))
        return tape.gradient(loss, [weight])

    call = in_mode(mode, step)
    call()
    with pytest.raises(ValueError, match=r"call tape\.end_step\(\) after the optimizer"):
        call()


@ranks(2)
@each_mode
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_slices_before_and_in_local_steps(mode, sparse_as_dense):
    hvd.init()
    table = tf.Variable(tf.zeros((4, 2), tf.float64))
    schedule = hvd.Schedule.LocalSGD(every=2, start=1)

    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        tape = hvd.DistributedGradientTape(tape, schedule=schedule, sparse_as_dense=sparse_as_dense)
        (gradient,) = tape.gradient(loss, [table])
        assert isinstance(gradient, tf.IndexedSlices) != sparse_as_dense
        table.assign_sub(tf.convert_to_tensor(gradient))
        tape.end_step()

    call = in_mode(mode, step)
    for _ in range(3):
        call(tf.constant([hvd.rank(), 3]))
    # One shared step, and two local ones, averaged.
    assert table.numpy()[:, 0].tolist() == [-1.5, -1.5, 0.0, -3.0]


@ranks(2)
@each_mode
def test_local_sources_are_left_alone(mode):
    hvd.init()
    shared, local = tf.Variable(0.0), tf.Variable(0.0)
    schedule = hvd.Schedule.LocalSGD(every=1)

    def step(slope):
        with tf.GradientTape() as tape:
            loss = slope * (shared + local)
        tape = hvd.DistributedGradientTape(tape, schedule=schedule)
        tape.register_local_source(local)
        for gradient, variable in zip(
            tape.gradient(loss, [shared, local]), [shared, local], strict=True
        ):
            variable.assign_sub(gradient)
        tape.end_step()

    in_mode(mode, step)(tf.constant(1.0 + hvd.rank()))
    assert shared.numpy() == -1.5
    assert local.numpy() == -1.0 - hvd.rank()


@ranks(2)
@each_mode
def test_weights_may_be_averaged_in_between(mode):
    hvd.init()
    weight = tf.Variable(0.0)

    def step(slope):
        with tf.GradientTape() as tape:
            loss = slope * weight
        tape = hvd.DistributedGradientTape(tape, schedule=hvd.Schedule.LocalSGD(every=5))
        weight.assign_sub(tape.gradient(loss, weight))
        tape.end_step()
        tape.average_weights()

    in_mode(mode, step)(tf.constant(1.0 + hvd.rank()))
    assert weight.numpy() == -1.5


@ranks(2)
def test_compressed_and_in_bfloat16():
    hvd.init()
    training = Training(hvd.Schedule.DiLoCo(every=2), compression=hvd.Compression.fp16)
    training.run(2)
    assert same_on_all_ranks(training.values())
    weight = tf.Variable([1.0, 2.0, 3.0], dtype=tf.bfloat16)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight) * tf.cast(1 + hvd.rank(), tf.bfloat16)
    tape = hvd.DistributedGradientTape(tape, schedule=hvd.Schedule.LocalSGD(every=1))
    weight.assign_sub(tape.gradient(loss, weight))
    tape.end_step()
    assert weight.numpy().astype(np.float32).tolist() == [-0.5, 0.5, 1.5]


@ranks(1)
def test_steps_are_counted_for_variables_as_long_as_they_live():
    hvd.init()
    gc.collect()
    before = len(exchange_state._states)
    training = Training(hvd.Schedule.LocalSGD(every=3))
    training.run(2)
    assert len(exchange_state._states) == before + 1
    assert list(exchange_state._states.values())[-1].steps.steps == 2
    del training
    gc.collect()
    assert len(exchange_state._states) == before


@ranks(1)
def test_what_is_refused():
    hvd.init()

    def tape(schedule, **options):
        return hvd.DistributedGradientTape(tf.GradientTape(), schedule=schedule, **options)

    local = hvd.Schedule.LocalSGD(every=2)
    for make, words in (
        (lambda: tape(hvd.Schedule.Accumulate(2)), "is for optimizers"),
        (
            lambda: tape(hvd.Schedule.PartialSync(2, momentum=True)),
            "optimizer keeps",
        ),
        (lambda: tape(local, op=hvd.Sum), "averages weights"),
        (lambda: tape(local).end_step(), r"end_step\(\) is for a tape"),
        (lambda: tape(None).average_weights(), r"average_weights\(\) is for a tape"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    assert tape(None).end_step() is None
    x = tf.constant(1.0)
    with tape(local) as of_tensors:
        of_tensors.watch(x)
        y = x * 2
    with pytest.raises(ValueError, match="one is no variable"):
        of_tensors.gradient(y, x)
    weight = tf.Variable(1.0)
    for every, words in ((2, ""), (3, r"LocalSGD\(every=2\).*LocalSGD\(every=3\).*same arguments")):
        with tape(hvd.Schedule.LocalSGD(every)) as recorded:
            y = weight * 2
        refusal = pytest.raises(ValueError, match=words) if words else contextlib.nullcontext()
        with refusal:
            recorded.gradient(y, weight)
            recorded.end_step()


def scheduled_stepper(variable, mode, **options):
    def step(given):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * given)
        tape = hvd.DistributedGradientTape(tape, **options)
        (found,) = tape.gradient(loss, [variable])
        variable.assign_sub(0.1 * found)
        tape.end_step()

    return in_mode(mode, step)


@each_mode
@ranks(2)
def test_a_schedule_goes_on_from_a_checkpoint(mode):
    """Resume between two outer steps, with outer momentum and residuals."""
    hvd.shutdown()
    hvd.init()
    options = {
        "schedule": hvd.Schedule.DiLoCo(every=2),
        "compression": hvd.Compression.ErrorFeedback(hvd.Compression.bf16),
    }
    whole = tf.Variable(tf.zeros(SHAPE), name="w")
    step = scheduled_stepper(whole, mode, **options)
    for number in range(7):
        if number == 3:
            saved, weights = hvd.exchange_state_dict([whole]), tf.identity(whole)
        step(gradient(number, hvd.rank()))
    assert saved["schedule"]["steps"] == 3
    again = tf.Variable(weights, name="w")
    hvd.load_exchange_state_dict([again], saved)
    assert hvd.exchange_state_dict([again])["schedule"]["steps"] == 3
    step = scheduled_stepper(again, mode, **options)
    for number in range(3, 7):
        step(gradient(number, hvd.rank()))
    np.testing.assert_array_equal(again.numpy(), whole.numpy())


@ranks(2)
def test_a_keras_optimizers_schedule_goes_on_from_a_checkpoint():
    import keras

    hvd.shutdown()
    hvd.init()
    options = {
        "schedule": hvd.Schedule.DiLoCo(every=2),
        "compression": hvd.Compression.ErrorFeedback(hvd.Compression.bf16),
    }

    def made():
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

    def step(optimizer, variable, number):
        optimizer.apply([tf.constant(gradient(number, hvd.rank()))], [variable])

    whole, optimizer = keras.Variable(np.zeros(SHAPE, np.float32), name="w"), made()
    for number in range(7):
        if number == 3:
            saved, weights = optimizer.exchange_state_dict(), whole.numpy()
        step(optimizer, whole, number)
    assert saved["schedule"]["steps"] == 3
    again, optimizer = keras.Variable(weights, name="w"), made()
    optimizer.load_exchange_state_dict(saved)
    for number in range(3, 7):
        step(optimizer, again, number)
    np.testing.assert_array_equal(again.numpy(), whole.numpy())


@ranks(2)
@each_mode
def test_variables_may_differ(mode):
    hvd.init()
    weight = tf.Variable([1.0 + hvd.rank(), 2.0])
    step = scheduled_stepper(weight, mode, schedule=hvd.Schedule.LocalSGD(every=3))
    for number in range(4):
        step(number + tf.ones(2))


@ranks(2)
def test_a_session_refuses_them():
    hvd.init()
    with tf.Graph().as_default():
        variable = tf.Variable(tf.ones(2))
        tape = hvd.DistributedGradientTape(
            tf.GradientTape(), schedule=hvd.Schedule.LocalSGD(every=2)
        )
        with tape:
            loss = tf.reduce_sum(variable)
        with pytest.raises(NotImplementedError, match="schedule of local steps in a graph for a"):
            tape.gradient(loss, [variable])


@ranks(2)
@each_mode
def test_a_rank_outside_of_the_process_set_keeps_its_gradients(mode):
    tapes.check_a_rank_outside_of_the_process_set(mode, schedule=hvd.Schedule.LocalSGD(every=2))


@ranks(1)
def test_optimizers_of_tensorflow_1_have_none():
    hvd.init()
    with pytest.raises(ValueError, match="it needs a Keras optimizer"):
        hvd.DistributedOptimizer(
            tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), schedule=hvd.Schedule.LocalSGD(every=2)
        )
