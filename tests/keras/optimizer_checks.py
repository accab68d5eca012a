"""Test Keras 3's ``fit`` and ``train_on_batch`` on any framework."""

import copy
import gc
import pickle
import weakref

import keras
import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.compression import ErrorFeedback
from hvdlite.observe import status
from tests.keras import close, exchanges, flat, not_finite, same_on_all_ranks
from tests.keras.models import (
    BATCH,
    EAGER,
    STEPS,
    bad_data,
    check_fit,
    data,
    data_without,
    fit,
    make_model,
    own,
    reference,
)


def test_names_schedules_weight_decay_and_moving_averages():
    sgd, decay = keras.optimizers.SGD, keras.optimizers.schedules.ExponentialDecay
    averaging = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}
    for make in (
        lambda: "adam",
        lambda: sgd(decay(0.2, 1, 0.8)),
        lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, **averaging),
    ):
        check_fit(hvd.DistributedOptimizer(make()), reference(make()))


def test_train_on_batch():
    counted = memoryview(bytearray(8)).cast("q")
    x, y = data()
    expected, model = make_model(), make_model()
    expected.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=EAGER, jit_compile=False)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), loss="mse")
    with exchanges() as count, pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "_notes", lambda: counted)
        for step in range(STEPS):
            rows = slice(step * BATCH * hvd.size(), (step + 1) * BATCH * hvd.size())
            expected.train_on_batch(x[rows], y[rows])
            model.train_on_batch(own(x[rows]), own(y[rows]))
    assert len(count) == counted[0] == STEPS
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), expected.get_weights())


def test_keras_adds_up_and_one_exchange_is_made_for_an_update():
    def make(**options):
        return keras.optimizers.SGD(0.2, momentum=0.5, gradient_accumulation_steps=3, **options)

    for options in ({}, {"global_clipnorm": 0.1}, {"loss_scale_factor": 64.0}):
        expected = reference(make(**options))
        check_fit(
            hvd.DistributedOptimizer(make(**options)), expected, STEPS // 3, graph=not options
        )


def test_backward_passes_of_a_built_optimizer():
    built = keras.optimizers.SGD(0.1)
    model = make_model()
    built.build(model.trainable_variables)
    hvd.DistributedOptimizer(built, backward_passes_per_step=2, average_aggregated_gradients=True)
    with exchanges() as count:
        fit(model, built, *map(own, data()), BATCH)
    assert len(count) == STEPS // 2
    expected = reference(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    assert close(model.get_weights(), expected)


def test_compression():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16, gradient_predivide_factor=2.0
    )
    fit(model, optimizer, *map(own, data()), BATCH)
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), reference(keras.optimizers.SGD(0.1)), 1e-2)


def test_optimizers_of_variables_that_are_described_alike_remember_their_own():
    """A GAN's networks, say: the residuals of one do not go to the other."""

    def train(turns, compression):
        draw = np.random.default_rng(hvd.rank()).normal
        gradients = draw(size=(2, STEPS, 40, 30)).astype(np.float32)
        twins = [keras.Variable(np.full((40, 30), n, np.float32), name="kernel") for n in range(2)]
        optimizers = [
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
            for _ in twins
        ]
        for step, number in turns:
            gradient = keras.ops.convert_to_tensor(gradients[number, step])
            optimizers[number].apply([gradient], [twins[number]])
        averages = hvd.allreduce(gradients, op=hvd.Average)
        return flat(twins), flat([n - 0.1 * averages[n].sum(axis=0) for n in range(2)])

    by_turns = [(step, number) for step in range(STEPS) for number in range(2)]
    for compression in (
        hvd.Compression.none,
        ErrorFeedback(hvd.Compression.TopK(0.05)),
        ErrorFeedback(hvd.Compression.PowerSGD(2)),
    ):
        found, expected = train(by_turns, compression)
        alone, _ = train(sorted(by_turns, key=lambda turn: turn[1]), compression)
        assert np.array_equal(found, alone)
        assert close(found, expected) == (compression is hvd.Compression.none)


def test_steps_that_are_not_finite_are_left_out_on_all_ranks():
    def plain(passes=None):
        return keras.optimizers.AdamW(
            0.05, weight_decay=0.1, use_ema=True, gradient_accumulation_steps=passes
        )

    rank, last = hvd.rank(), hvd.size() - 1
    x, y = map(own, bad_data(np.nan))
    expected = {
        passes: reference(plain(passes), data_without(*range(2, 2 + (passes or 1))))
        for passes in (None, 2)
    }
    for passes, graph in ((None, True), (2, True), (2, False)):
        with not_finite("skip") as told:
            model, optimizer = make_model(), hvd.DistributedOptimizer(plain(passes))
            fit(model, optimizer, x, y, BATCH, graph)
            assert same_on_all_ranks([v.numpy() for v in optimizer.variables])
        assert close(model.get_weights(), expected[passes])
        steps = STEPS // (passes or 1) - 1
        assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == steps
        assert len(told) == (rank == 0)
        assert all(f"second/bias' on rank {last} (1 of 1 elements" in t for t in told), told


def test_mixed_precision_of_a_model():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model()
    finally:
        keras.config.set_dtype_policy("float32")
    # A small loss at a large rate: Keras begins with a large scale, and no step is to overflow.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(6.4))
    model.compile(optimizer=optimizer, loss="mse", loss_weights=1 / 64)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = map(own, data())
    with exchanges() as count:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert len(count) == STEPS
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == STEPS
    assert same_on_all_ranks(model.get_weights())
    assert close(model.get_weights(), reference(keras.optimizers.SGD(0.1)), 2e-2)


def test_loss_scaling_around_accumulation():
    def make(wrap):
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(wrap(inner), initial_scale=2.0**8)

    check_fit(make(hvd.DistributedOptimizer), reference(make(lambda inner: inner)))


def test_next_values_in_the_place_of_gradients_are_the_greatest_of_all_ranks_and_passes():
    """Keras computes those of the scales of float8 so; weights are as they are without them."""
    compression, adding = hvd.Compression.fp16, {"backward_passes_per_step": 2}
    for options, passes, factor in (
        ({}, 1, 1.0),
        ({"op": hvd.Sum}, 1, hvd.size()),
        ({"compression": compression, "gradient_predivide_factor": 2.0}, 1, 1.0),
        (adding, 2, 2.0),
        ({**adding, "average_aggregated_gradients": True}, 2, 1.0),
    ):
        weight, scale = (keras.Variable(np.zeros(3, np.float32), name=name) for name in "ab")
        scale.overwrite_with_gradient = True
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        draw = np.random.default_rng(0).uniform(size=(STEPS, passes, hvd.size(), 3))
        for step, values in enumerate(draw.astype(np.float32), start=1):
            for each in values[:, hvd.rank()]:
                gradients = np.full(3, 1.0 + hvd.rank(), np.float32), each
                optimizer.apply([*map(keras.ops.convert_to_tensor, gradients)], [weight, scale])
            mean = (1 + hvd.size()) / 2
            assert close(flat([weight]), [-step * mean * factor] * 3, 1e-2)
            assert np.array_equal(flat([scale]), values.max(axis=(0, 1)))


def test_the_scales_of_float8_are_those_of_one_process():
    found = []
    for optimizer, rows, batch in (
        (keras.optimizers.SGD(0.1), data(), BATCH * hvd.size()),
        (hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), map(own, data()), BATCH),
    ):
        model = make_model()
        for layer in model.layers:
            layer.quantize("float8")
        fit(model, optimizer, *rows, batch, graph=True)
        # The gradients of a rank's mean loss are larger, by the number of ranks.
        scales = [v for v in model.trainable_weights if v.overwrite_with_gradient]
        found.append(flat([v for v in scales if "outputs_grad" not in v.path]))
    assert close(*found, 1e-3)


def test_keras_and_other_optimizers_are_as_they_were():
    with exchanges() as count:
        fit(make_model(), keras.optimizers.SGD(0.1), *map(own, data()), BATCH)
    assert count == []


def test_what_is_refused():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    refusals = [
        (ValueError, "wrap it once", lambda: hvd.DistributedOptimizer(optimizer)),
        (
            ValueError,
            "wrap it once",
            lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)),
        ),
        (TypeError, "expected a Keras optimizer, found int", lambda: hvd.DistributedOptimizer(1)),
        (
            ValueError,
            "gradient_accumulation_steps=3",
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
                backward_passes_per_step=2,
            ),
        ),
        (
            ValueError,
            "is not a registered process set",
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=object()),
        ),
        (TypeError, "cannot be copied", lambda: copy.deepcopy(optimizer)),
        (TypeError, "cannot be copied", lambda: pickle.dumps(optimizer)),
    ]
    for kind, words, call in refusals:
        with pytest.raises(kind, match=words):
            call()
    assert flat([v.numpy() for v in optimizer.variables]).size == 2


def test_a_layer_that_is_thawed_needs_another_optimizer():
    for accumulation in (None, 2):
        model = make_model()
        model.layers[0].trainable = False
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
        fit(model, hvd.DistributedOptimizer(optimizer), *map(own, data()), BATCH)
        model.layers[0].trainable = True
        with pytest.raises(ValueError, match="Unknown variable"):
            fit(model, optimizer, *map(own, data()), BATCH)


def test_an_optimizer_that_is_discarded_is_freed():
    """The state of its compression is freed too, although the variables live on."""
    weights = [keras.Variable(np.zeros(3, np.float32), name=name) for name in "ab"]
    for compression in (hvd.Compression.none, ErrorFeedback(hvd.Compression.fp16)):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
        for _ in range(3):
            optimizer.apply([keras.ops.ones(3), keras.ops.ones(3)], weights)
        gone = [weakref.ref(each) for each in (optimizer, optimizer._hvdlite)]
        del optimizer
        gc.collect()
        assert [each() for each in gone] == [None, None]


def test_a_gradient_is_left_out_by_nobody():
    """Keras alone applies as many gradients as there are and raises no error."""
    for scaled in (False, True):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        weights = [keras.Variable(np.zeros(2, np.float32), name=name) for name in "ab"]
        gradients = [keras.ops.ones(2) * (hvd.rank() + 1)]
        with pytest.raises(ValueError, match="1 gradients for 0 variables"):
            optimizer.apply(gradients)
        with pytest.raises(ValueError, match="1 gradients for 2 variables"):
            optimizer.apply(gradients, weights)
        optimizer.build(weights)
        with pytest.raises(ValueError, match="1 gradients for 2 variables"):
            optimizer.apply(gradients)
        assert not any(keras.ops.convert_to_numpy(weight).any() for weight in weights)
