"""Check that the callbacks of any Keras know how far a training has come, and where it goes on."""

import numpy as np
import pytest

from tests.keras.models import TORCH, hvd, keras


def make_model(seed, dropout=0.0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dropout(dropout, seed=11),
            keras.layers.Dense(1),
        ]
    )


def data(samples=32):
    inputs = np.random.default_rng(5).normal(size=(samples, 3)).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True)


def values(variables):
    return [np.array(variable.numpy()).tolist() for variable in variables]


class Committed(hvd.elastic.KerasState):
    """Remembers what has been committed."""

    def save(self):
        super().save()
        if hasattr(self, "seen"):
            self.seen.append((self.epoch, self.batch))


def fit(order=1, per_call=1, **where):
    """Fit epochs of eight batches; return what is committed, and what steps are trained on."""
    model = make_model(0)
    batches = []

    class Model(keras.Sequential):
        def train_step(self, inputs):
            if per_call == 1:
                batches.append(float(inputs[0][0, 0]))
            return super().train_step(inputs)

    model = Model(model.layers)
    model.build((None, 3))
    options = {"run_eagerly": per_call == 1, "steps_per_execution": per_call}
    model.compile("adam", "mse", jit_compile=False, **options)
    state = Committed(model, batch=where.pop("batch", 0), epoch=where.pop("epoch", 0))
    state.seen = []
    callbacks = [
        hvd.elastic.CommitStateCallback(state, 3),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    model.fit(
        *data(), batch_size=4, shuffle=False, verbose=0, callbacks=callbacks[::order], **where
    )
    return state, batches


def test_commits_know_how_far_training_has_come():
    for order in (1, -1):
        state, _ = fit(order, epochs=2)
        ends = [(1, 0), (2, 0)]
        assert state.seen == [(0, 3), (0, 6), ends[0], (1, 1), (1, 4), (1, 7), ends[1]]
        assert (state.epoch, state.batch) == (2, 0)
    if not TORCH:  # where Keras makes one step in each call
        state, _ = fit(per_call=2, epochs=1)
        assert state.seen == [(0, 4), (0, 6), (1, 0)]


def test_an_epoch_goes_on_in_the_middle():
    _, whole = fit(epochs=1)
    for order, where in ((1, {"epochs": 2}), (-1, {"epochs": 3, "initial_epoch": 1})):
        state, batches = fit(order, batch=5, epoch=1, **where)
        assert batches == whole[5:] + whole
        assert state.seen == [(1, 8), (2, 0), (2, 3), (2, 6), (3, 0)]
        changed = [*state.model.variables, *state.optimizer.variables]
        kept = values(changed)
        state.model.fit(*data(), verbose=0)
        assert sum(now != before for now, before in zip(values(changed), kept, strict=True)) >= 12
        state.restore()
        assert values(changed) == kept


def test_an_epoch_that_was_done_but_for_its_end():
    state, batches = fit(batch=8, epochs=1)
    assert batches == []
    assert (state.epoch, state.batch) == (1, 0)


def test_a_fit_that_was_interrupted_while_batches_were_left_out():
    model = make_model(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    leave_out = hvd.elastic.UpdateBatchStateCallback(hvd.elastic.KerasState(model, batch=2))

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise InterruptedError

    given = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with pytest.raises(InterruptedError):
        model.fit(*data(), callbacks=[leave_out, Interrupt()], **given)
    model.fit(*data(), callbacks=[leave_out], **given)
    assert int(optimizer.iterations.numpy()) == 6
