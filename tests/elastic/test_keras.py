"""Keras models and TensorFlow variables that are kept, and `fit` that goes on in the middle."""

from __future__ import annotations

import json
import logging
import pickle
import sys

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.keras import elastic, shard
from hvdlite.keras.elastic import KerasState, run
from hvdlite.tensorflow.elastic import TensorFlowKerasState, TensorFlowState
from tests.elastic.keras_checks import data, make_model, values
from tests.harness import ranks
from tests.launch import launcher

PATIENCE = 240.0  # to import TensorFlow on a busy machine takes a minute


class TestStates:
    def test_variables_come_back_and_twice(self):
        first, second = tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)
        state = TensorFlowState({"a": first, "b": [second]}, epoch=0)
        first.assign([5.0, 6.0])
        state.save()
        for _ in range(2):
            first.assign_add([1.0, 1.0])
            second.assign(9)
            state.epoch = 4
            state.restore()
            assert values([first, second]) == [[5.0, 6.0], 3]
            assert state.epoch == 0

    def test_another_process_goes_on_from_a_dump(self):
        states = []
        for seed in (1, 2):
            model = make_model(seed)
            model.compile(keras.optimizers.Adam(0.1 * seed), "mse", run_eagerly=True)
            states.append(KerasState(model, epoch=seed))
        state, other = states
        state.model.fit(*data(), verbose=0)
        other.load(pickle.loads(pickle.dumps(state.dump())))
        assert other.epoch == 1
        assert values(other.model.weights) == values(state.model.weights)
        assert values(other.optimizer.variables) == values(state.optimizer.variables)
        assert float(other.optimizer.learning_rate.numpy()) == pytest.approx(0.1)
        tensors = TensorFlowState([tf.Variable([1.0, 2.0])], step=3)
        again = TensorFlowState([tf.Variable([0.0, 0.0])], step=0)
        again.load(pickle.loads(pickle.dumps(tensors.dump())))
        assert (values(again.variables), again.step) == ([[1.0, 2.0]], 3)
        with pytest.raises(hvd.HorovodInternalError, match="has 1 variables, this one 1, or"):
            TensorFlowState([tf.Variable([0.0])], step=0).load(tensors.dump())

    @ranks(2, timeout=PATIENCE)
    def test_variables_are_those_of_rank_0(self):
        hvd.init()
        rank = hvd.rank()
        variable = tf.Variable([1.0 + rank])
        state = TensorFlowState([variable], epoch=rank)
        state.sync()
        assert (values([variable]), state.epoch) == ([[1.0]], 0)
        variable.assign([7.0])
        state.restore()
        assert values([variable]) == [[1.0]]
        shape = [1 + rank]
        with pytest.raises(hvd.HorovodInternalError, match=r"float32\[1\].*float32\[2\]"):
            TensorFlowState([tf.Variable(tf.zeros(shape))]).sync()

    def test_what_tensorflow_2_has_not_is_refused(self):
        with pytest.raises(ValueError, match="sessions belong to TensorFlow 1"):
            TensorFlowState([tf.Variable(1.0)], session=object())
        with pytest.raises(ValueError, match="no list of all variables"):
            TensorFlowState()

    def test_a_model_and_its_optimizer_come_back(self):
        assert TensorFlowKerasState is KerasState
        model = make_model(0, dropout=0.5)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        state = KerasState(model, batch=0, epoch=0)
        assert state.optimizer is model.optimizer
        everything = [*model.variables, *model.optimizer.variables]
        before = values(everything)
        for _ in range(2):
            model.fit(*data(), epochs=1, verbose=0)
            model.optimizer.learning_rate = 0.5
            assert all(new != old for new, old in zip(values(everything), before, strict=True))
            state.restore()
            assert values(everything) == before

    @pytest.mark.slow
    @ranks(2, timeout=PATIENCE)
    @pytest.mark.parametrize("is_tape", [False, True])
    def test_a_schedule_begins_anew_with_its_variables(self, is_tape):
        hvd.init()
        model = make_model(0)
        schedule = hvd.Schedule.LocalSGD(4)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), schedule=schedule), "mse")
        variable = tf.Variable([1.0])
        state = TensorFlowState([variable]) if is_tape else KerasState(model)

        def step():
            if is_tape:
                with hvd.DistributedGradientTape(tf.GradientTape(), schedule=schedule) as tape:
                    loss = variable * 2.0
                variable.assign_sub(tape.gradient(loss, [variable])[0])
                tape.end_step()
            else:
                model.train_on_batch(*data(4))

        def steps():
            if is_tape:
                return hvd.exchange_state_dict([variable])["schedule"]["steps"]
            return model.optimizer.exchange_state_dict()["schedule"]["steps"]

        step()
        step()
        assert steps() == 2
        state.restore()
        assert steps() == 0
        step()
        state.save()
        step()
        state.restore()
        assert steps() == 1

    @ranks(2, timeout=PATIENCE)
    def test_what_a_schedule_remembers_is_everybodys(self):
        """Also of a process that comes in, in the middle of a round."""
        hvd.init()
        schedule = hvd.Schedule.DiLoCo(every=2)
        model = make_model(0)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), schedule=schedule), "mse")
        for _ in range(3):
            model.train_on_batch(*data(4))
        state = KerasState(model)
        expected = hvd.broadcast_object(pickle.dumps(model.optimizer.exchange_state_dict()))
        if hvd.rank() == 1:
            model.optimizer.load_exchange_state_dict({})
        state.sync()
        found = model.optimizer.exchange_state_dict()["schedule"]
        assert found["steps"] == 3
        for name, entry in pickle.loads(expected)["schedule"]["outer"].items():
            assert sorted(entry) == sorted(found["outer"][name]) == ["anchor", "momentum"]
            for key, array in entry.items():
                np.testing.assert_array_equal(found["outer"][name][key], array)

    @ranks(2, timeout=PATIENCE)
    def test_what_a_tape_has_not_sent_stays_each_ranks_own(self):
        hvd.init()
        rank = hvd.rank()
        compression = hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.5))
        first, second = tf.Variable([0.0, 0.0]), tf.Variable(0.0)
        state = TensorFlowState([second, first])

        def step(last):
            with hvd.DistributedGradientTape(
                tf.GradientTape(), compression=compression, op=hvd.Sum
            ) as tape:
                loss = tf.reduce_sum(first * [8.0, last])
            return tape.gradient(loss, [first])[0].numpy().tolist()

        def left():
            saved = hvd.exchange_state_dict([first])["compression"]["parameters"]
            return [
                (int(entry["exchanges"]), entry["residual"].tolist()) for entry in saved.values()
            ]

        assert step(1.0 + rank) == [16.0, 0.0]
        state.save()
        assert step(1.0 + rank) == [16.0, 0.0]
        assert left() == [(2, [0.0, 2.0 + 2.0 * rank])]
        state.restore()
        assert left() == [(1, [0.0, 1.0 + rank])]
        state.sync()
        assert left() == [(1, [0.0, 1.0 + rank])]
        if rank == 1:  # as one that comes in
            hvd.load_exchange_state_dict([first], {})
        state.sync()
        found = hvd.exchange_state_dict([first])["compression"]["parameters"]
        (entry,) = found.values()
        assert int(entry["exchanges"]) == 1
        assert ("residual" in entry) == (rank == 0)

    def test_a_model_that_is_not_built_is_refused(self):
        with pytest.raises(ValueError, match=r"call model\.build"):
            KerasState(keras.Sequential([keras.layers.Dense(1)]))

    @ranks(2, timeout=PATIENCE)
    def test_a_model_is_that_of_rank_0_and_its_seeds_are_its_own(self):
        hvd.init()
        model = make_model(hvd.rank(), dropout=0.5)
        model.compile(keras.optimizers.SGD(0.1 + hvd.rank(), momentum=0.9), "mse")
        weights = set(map(id, model.weights))
        (seed,) = (variable for variable in model.variables if id(variable) not in weights)
        seed.assign(seed.numpy() + np.uint32(hvd.rank()))
        state = KerasState(model)
        state.sync()
        shared = hvd.allgather_object(values([*model.weights, *model.optimizer.variables]))
        assert shared[0] == shared[1]
        seeds = hvd.allgather_object(values([seed]))
        assert seeds[0] != seeds[1]


@ranks(2, timeout=PATIENCE)
def test_a_state_leaves_each_rank_its_part_of_the_data():
    hvd.init()
    batches = shard(np.arange(8), batch_size=1, shuffle=False)
    state = KerasState(make_model(1), batches=batches)
    state.sync()
    assert state.batches is batches
    assert sorted(hvd.allgather(np.concatenate(list(batches))).numpy()) == [*range(8)]


def test_a_number_of_batches_below_one_is_refused():
    with pytest.raises(ValueError, match="batches_per_commit=0"):
        elastic.CommitStateCallback(None, 0)


class Averaged(keras.optimizers.Adam):
    """Averages its gradients, whatever else does."""

    def apply(self, grads, trainable_variables=None):
        grads = [hvd.allreduce(grad, name=f"g{n}") for n, grad in enumerate(grads)]
        return super().apply(grads, trainable_variables)


def train(failing):
    logging.getLogger("hvdlite").handlers[:] = [logging.NullHandler()]
    model = make_model(hvd.rank(), dropout=0.2)
    model.compile(Averaged(0.01), "mse", jit_compile=False)
    state = KerasState(model, batch=0, epoch=0)
    begun, left = [], ["once"]

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (state.epoch, batch) == (1, 2) and left and failing:
                left.pop()
                if hvd.rank() == hvd.size() - 1:
                    raise hvd.HorovodInternalError("made up")

    callbacks = [
        elastic.UpdateEpochStateCallback(state),
        elastic.UpdateBatchStateCallback(state),
        Fail(),
        elastic.CommitStateCallback(state, 2),
    ]
    inputs, labels = (each[hvd.rank() :: hvd.size()] for each in data(24))

    @run
    def fit(state):
        begun.append((state.epoch, state.batch))
        state.model.fit(
            inputs,
            labels,
            batch_size=2,
            epochs=3 - state.epoch,
            shuffle=False,
            callbacks=callbacks,
            verbose=0,
        )

    fit(state)
    assert begun == ([(0, 0), (1, 2)] if failing else [(0, 0)])
    return values([*model.weights, *model.optimizer.variables])


@ranks(2, timeout=PATIENCE)
def test_fit_ends_with_the_weights_of_an_undisturbed_run(size):
    hvd.init()
    disturbed = train(failing=True)
    assert hvd.allgather_object(disturbed) == [disturbed] * size
    assert train(failing=False) == disturbed


@pytest.mark.slow
def test_a_spare_goes_on_with_fit():
    job = launcher.hvdliterun(
        *("--elastic", "-np", 3, "--spares", 1),
        *(sys.executable, "tests/elastic/sparing_keras.py"),
        env={"HVDLITE_REHEARSE": "kill:rank=1,step=5", "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=PATIENCE,
    )
    assert job.returncode == 0, job.stderr
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("[")]
    began, ended = zip(*sorted(lines, key=lambda line: line[0]["process"]), strict=True)
    for reports, batches in ((began, 6), (ended, 16)):
        assert [each["process"] for each in reports] == [0, 2, 3]
        assert [each["steps"] for each in reports] == [batches] * 3
        for key in ("weights", "optimizer", "common"):
            assert len({each[key] for each in reports}) == 1
    assert began[0]["keys"] == ended[2]["keys"] == ["exchanges", "q", "residual"]
    assert began[2]["keys"] == ["exchanges", "q"]


@ranks(2, timeout=PATIENCE)
def test_variables_in_a_graph():
    """A custom loop in tf.function; what the graph raises is known by its text."""
    hvd.init()
    logging.getLogger("hvdlite").handlers[:] = [logging.NullHandler()]
    weight = tf.Variable([0.0, 0.0])
    calls = []

    @tf.function
    def step(share):
        weight.assign_add(hvd.allreduce(share, name="share"))

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        while state.step < 4:
            step(tf.fill([2], hvd.rank() * 1.0))
            if state.step == 2 and len(calls) == 1 and hvd.rank() == 1:
                raise hvd.HorovodInternalError("made up")
            state.step += 1
            state.commit()

    train(hvd.elastic.TensorFlowState([weight], step=0))
    assert values([weight]) == [[2.0, 2.0]]
    assert len(calls) == 2
