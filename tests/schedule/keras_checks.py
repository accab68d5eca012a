"""Test schedules with Keras 3 on any framework.

Each check runs on every rank of a job. Expected weights come from Keras itself, which simulates
all ranks in one process, and from numpy.
"""

import keras
import numpy as np
import pytest

import hvdlite.keras as hvd
from tests.keras import close, exchanges, same_on_all_ranks
from tests.keras.models import BATCH, EAGER, STEPS, data, fit, make_model, own

#: By hand: 30, then 6, 6 and 1 elements.
PARTS = [[0], [1, 2, 3]]


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


class Simulation:
    """All ranks' models in one process."""

    def __init__(self, make=sgd):
        self.models = [make_model() for _ in range(hvd.size())]
        for model in self.models:
            model.compile(make(), "mse", run_eagerly=EAGER, jit_compile=False)
        self.shared = make_model().get_weights()
        self.speed = [np.zeros_like(weight) for weight in self.shared]

    def step(self, step, share=False):
        x, y = (each[step * BATCH * hvd.size() :][: BATCH * hvd.size()] for each in data())
        for rank, model in enumerate(self.models):
            rows = slice(None) if share else slice(rank, None, hvd.size())
            model.train_on_batch(x[rows], y[rows])

    def average(self, numbers=range(4), momentum=False):
        for number in numbers:
            average([model.trainable_variables[number] for model in self.models])
            if momentum:
                average([model.optimizer.momentums[number] for model in self.models])

    def outer_step(self, rate=0.7, momentum=0.9):
        own = [model.get_weights() for model in self.models]
        for number, weight in enumerate(self.shared):
            outer = weight - sum(each[number] for each in own) / len(own)
            self.speed[number] = momentum * self.speed[number] + outer
            self.shared[number] = weight - rate * (outer + momentum * self.speed[number])
        for model in self.models:
            model.set_weights(self.shared)

    def weights(self):
        return self.models[hvd.rank()].get_weights()


def average(variables):
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    for variable in variables:
        variable.assign(sum(values) / len(values))


def trained(schedule, make=sgd, graph=True, **options):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(), schedule=schedule, **options)
    with exchanges() as count:
        fit(model, optimizer, *map(own, data()), BATCH, graph)
    return model, optimizer, sum("bucket" in name for name in count)


def test_post_local_sgd_in_fit():
    model, optimizer, buckets = trained(hvd.Schedule.LocalSGD(every=3, start=2))
    assert buckets == 3  # two of gradients, one of weights
    expected = Simulation()
    for step in range(STEPS):
        expected.step(step, share=step < 2)
        if step == 4:
            expected.average()
    assert close(model.get_weights(), expected.weights())
    assert not same_on_all_ranks(model.get_weights())
    optimizer.average_weights()
    expected.average()
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), expected.weights())


def test_diloco_in_fit():
    def make():
        return keras.optimizers.Adam(0.05)

    model, _, buckets = trained(hvd.Schedule.DiLoCo(every=2), make)
    assert buckets == STEPS // 2
    expected = Simulation(make)
    for step in range(STEPS):
        expected.step(step)
        if step % 2:
            expected.outer_step()
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), expected.weights())


def test_partial_synchronisation_in_fit():
    for momentum in (False, True):
        model, _, buckets = trained(hvd.Schedule.PartialSync(parts=2, momentum=momentum))
        assert buckets == STEPS
        expected = Simulation()
        for step in range(STEPS):
            expected.step(step)
            expected.average(PARTS[step % 2], momentum)
        assert close(model.get_weights(), expected.weights())


def test_steps_by_train_on_batch_and_local_layers():
    x, y = data()
    model = make_model()
    optimizer = hvd.PartialDistributedOptimizer(
        sgd(), local_layers=model.layers[0], schedule=hvd.Schedule.LocalSGD(every=2)
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    expected = Simulation()
    for step in range(2):
        rows = slice(step * BATCH * hvd.size(), (step + 1) * BATCH * hvd.size())
        model.train_on_batch(own(x[rows]), own(y[rows]))
        expected.step(step)
    expected.average([2, 3])
    assert close(model.get_weights(), expected.weights())


def test_calls_that_train_some_of_the_weights():
    for schedule in (hvd.Schedule.LocalSGD(2), hvd.Schedule.DiLoCo(4)):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(), schedule=schedule)
        optimizer.build(model.trainable_variables)
        for step in range(4):
            some = model.trainable_variables[step % 2 :: 2]
            gradients = [keras.ops.ones(each.shape) * (1.0 + hvd.rank()) for each in some]
            optimizer.apply(gradients, some)
        assert same_on_all_ranks(model.get_weights())
        expected = make_model()
        plain = sgd()
        plain.build(expected.trainable_variables)
        for step in range(4):
            some = expected.trainable_variables[step % 2 :: 2]
            mean = (1.0 + hvd.size()) / 2
            plain.apply([keras.ops.ones(each.shape) * mean for each in some], some)
        pairs = zip(make_model().get_weights(), expected.get_weights(), strict=True)
        rate = 0.7 * 1.9 if schedule.sends_changes else 1.0
        assert close(model.get_weights(), [w - rate * (w - end) for w, end in pairs])


def test_accumulation_is_that_of_backward_passes():
    first, _, count = trained(hvd.Schedule.Accumulate(2), graph=False)
    second, _, same = trained(None, graph=False, backward_passes_per_step=2)
    assert count == same == STEPS // 2
    assert close(first.get_weights(), second.get_weights(), 0.0)


def test_what_schedules_refuse():
    local = hvd.Schedule.LocalSGD(every=2)

    def wrap(optimizer, **options):
        return hvd.DistributedOptimizer(optimizer, schedule=local, **options)

    scaling = keras.optimizers.LossScaleOptimizer
    adding = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    for make, words in (
        (lambda: wrap(sgd(), backward_passes_per_step=2), "leave one of them out"),
        (lambda: wrap(adding), "with gradient_accumulation_steps"),
        (lambda: wrap(scaling(sgd())), "a LossScaleOptimizer leaves out the step"),
        (lambda: wrap(sgd(), op=hvd.Sum), "averages weights"),
        (lambda: wrap(sgd()).average_weights(), "after its first step"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    model = make_model()
    with pytest.raises(Exception, match="a LossScaleOptimizer leaves out the step"):
        fit(model, scaling(wrap(sgd())), *map(own, data()), BATCH)


def test_scales_of_float8_are_refused():
    model = make_model()
    for layer in model.layers:
        layer.quantize("float8")
    local = hvd.DistributedOptimizer(sgd(), schedule=hvd.Schedule.LocalSGD(every=2))
    with pytest.raises(ValueError, match="quantized to float8"):
        fit(model, local, *map(own, data()), BATCH, graph=True)


def test_replicas_may_differ():
    optimizer = hvd.DistributedOptimizer(sgd(), schedule=hvd.Schedule.LocalSGD(every=4))
    model = make_model(seed=hvd.rank())
    fit(model, optimizer, *map(own, data()), BATCH)
    assert not same_on_all_ranks(model.get_weights())


def test_the_samples_of_a_batch_have_no_meaning():
    optimizer = hvd.DistributedOptimizer(sgd(), schedule=hvd.Schedule.LocalSGD(every=2))
    weights = make_model().trainable_variables
    with pytest.raises(ValueError, match=r"with a schedule or hvd\.Adasum each rank steps"):
        optimizer.apply([keras.ops.ones(weight.shape) for weight in weights], weights, batch_size=1)
