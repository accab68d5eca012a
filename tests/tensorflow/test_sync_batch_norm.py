import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import close, each_mode, in_mode

CHANNELS = 3


def rows_of(rank):
    return 2 * rank + 1  # 1, 3, 5, 7


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(loc=3.0, size=shape)


def shards(size, *rest, seed=0):
    """Return each rank's batch; their sizes differ."""
    return [draw(rows_of(rank), *rest, seed=(seed, rank)) for rank in range(size)]


def own_rows():
    """Return the rows of this rank's batch among those of all ranks."""
    start = sum(rows_of(rank) for rank in range(hvd.rank()))
    return slice(start, start + rows_of(hvd.rank()))


class Reference:
    """Batch normalization in one process, in numpy, with the derivative of sum(y * w)."""

    def __init__(self, x, w, gamma, beta, axis, counted=None, epsilon=1e-3):
        axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
        shape = [x.shape[axis] if a == axis % x.ndim else 1 for a in range(x.ndim)]
        m = np.ones_like(x) if counted is None else np.broadcast_to(counted, x.shape)
        n = m.sum(axes, keepdims=True)
        self.mean = (m * x).sum(axes, keepdims=True) / n
        self.variance = (m * (x - self.mean) ** 2).sum(axes, keepdims=True) / n
        scale = 1 / np.sqrt(self.variance + epsilon)
        hat = (x - self.mean) * scale
        self.y = hat * gamma.reshape(shape) + beta.reshape(shape)
        of_hat = w * gamma.reshape(shape)
        of_scale = (of_hat * hat).sum(axes, keepdims=True) / n
        self.of_x = scale * (of_hat - m * (of_hat.sum(axes, keepdims=True) / n + hat * of_scale))
        self.of_gamma, self.of_beta = (w * hat).sum(axes), w.sum(axes)
        self.mean, self.variance = self.mean.ravel(), self.variance.ravel()


def make_layer(dtype="float64", **options):
    layer = hvd.SyncBatchNormalization(dtype=dtype, momentum=0.75, **options)
    axis = options.get("axis", -1)
    layer.build([CHANNELS if a == axis % 4 else None for a in range(4)])
    layer.gamma.assign([0.5, 1.0, 2.0])
    layer.beta.assign([-1.0, 0.0, 1.0])
    return layer


@ranks(1, 2)
@each_mode
@pytest.mark.parametrize("axis", [-1, 1])
def test_the_same_as_one_process_with_all_batches(size, mode, axis):
    hvd.init()
    rest = (CHANNELS, 2, 5) if axis == 1 else (2, 5, CHANNELS)
    x, w = shards(size, *rest), shards(size, *rest, seed=1)
    layer = make_layer(axis=axis)
    gamma, beta = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.0, 1.0])
    expected = Reference(np.concatenate(x), np.concatenate(w), gamma, beta, axis)
    own = own_rows()

    def step(x, w):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * w)
        with hvd.DistributedGradientTape(tape, op=hvd.Sum) as summed:
            pass
        return y, tape.gradient(loss, x), summed.gradient(loss, [layer.gamma, layer.beta])

    step = in_mode(mode, step)
    for number in (1, 2):
        y, of_x, (of_gamma, of_beta) = step(*(tf.constant(each[hvd.rank()]) for each in (x, w)))
        assert y.dtype == tf.float64
        assert close(y, expected.y[own], 1e-12)
        assert close(of_x, expected.of_x[own], 1e-12)
        assert close(of_gamma, expected.of_gamma, 1e-12)
        assert close(of_beta, expected.of_beta, 1e-12)
        kept = 0.75**number
        assert close(layer.moving_mean, expected.mean * (1 - kept), 1e-12)
        assert close(layer.moving_variance, kept + expected.variance * (1 - kept), 1e-12)


@ranks(2)
@each_mode
def test_masked_elements_do_not_count(size, mode):
    hvd.init()
    x, w = shards(size, 4, CHANNELS), shards(size, 4, CHANNELS, seed=1)
    masks = [draw(rows_of(rank), 4, seed=(2, rank)) > 3.0 for rank in range(size)]
    masks[-1][...] = False  # on one rank none counts
    gamma, beta = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.0, 1.0])
    expected = Reference(
        *map(np.concatenate, (x, w)), gamma, beta, -1, np.concatenate(masks)[..., None]
    )
    own = own_rows()
    layer = make_layer()
    layer.input_spec = None

    def step(x, w, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(y * w)
        return y, tape.gradient(loss, x)

    own_parts = [tf.constant(each[hvd.rank()]) for each in (x, w, masks)]
    y, of_x = in_mode(mode, step)(*own_parts)
    assert close(y, expected.y[own], 1e-12)
    assert close(of_x, expected.of_x[own], 1e-12)
    assert close(layer.moving_mean, 0.25 * expected.mean, 1e-12)
    with pytest.raises(ValueError, match="one axis less than the inputs"):
        layer(own_parts[0], training=True, mask=own_parts[2][0])


@ranks(2)
def test_what_is_masked_may_be_anything():
    hvd.init()
    x = np.where(np.arange(4)[:, None] < 2, [[2.0 * hvd.rank(), 5.0]], np.nan)
    layer = hvd.SyncBatchNormalization(dtype="float64", momentum=0.0)
    y = layer(tf.constant(x), training=True, mask=tf.constant([0.5, 1.0, 0.0, 0.0]))
    assert close(layer.moving_mean, [1.0, 5.0])  # what is not 0 counts in full
    assert close(layer.moving_variance, [1.0, 0.0])
    assert close(y[:2, 0], np.full(2, (2.0 * hvd.rank() - 1.0) / np.sqrt(1.001)))


@ranks(2)
@each_mode
def test_statistics_of_no_element_move_nothing(mode):
    hvd.init()
    layer = make_layer()
    layer.moving_mean.assign([4.0, 5.0, 6.0])
    x = tf.constant(draw(4, 1, 1, CHANNELS))
    in_mode(mode, lambda: layer(x[:0], training=True))()
    in_mode(mode, lambda: layer(x, training=True, mask=tf.zeros((4, 1, 1))))()
    assert layer.moving_mean.numpy().tolist() == [4.0, 5.0, 6.0]
    assert layer.moving_variance.numpy().tolist() == [1.0] * CHANNELS


@ranks(2)
def test_a_rank_may_have_an_empty_batch():
    hvd.init()
    layer = make_layer()
    x = draw(4, 1, 1, CHANNELS)
    y = layer(tf.constant(x if hvd.rank() else x[:0]), training=True)
    assert y.shape[0] == 4 * hvd.rank()
    assert close(layer.moving_mean, 0.25 * x.mean((0, 1, 2)), 1e-12)
    assert np.isfinite(y).all()


@ranks(2)
def test_16_bit_floats_have_statistics_of_32():
    hvd.init()
    for dtype, unit in (("float16", 2**-11), ("bfloat16", 2**-8)):
        # The squares are beyond float16, and the sums beyond the digits of either.
        x = np.where(np.arange(4000)[:, None] % 2 == hvd.rank(), 300.0, 500.0).repeat(CHANNELS, 1)
        x[: 1000 * hvd.rank()] = 300.0
        layer = hvd.SyncBatchNormalization(dtype=f"mixed_{dtype}", momentum=0.0)
        y = layer(tf.constant(x, tf.as_dtype(dtype)), training=True)
        everywhere = np.concatenate(
            [np.asarray(part) for part in hvd.allgather_object(np.asarray(x))]
        ).astype(np.float64)
        mean, variance = everywhere.mean(0), everywhere.var(0)
        assert y.dtype == dtype
        assert layer.moving_mean.dtype == "float32"
        assert close(layer.moving_mean, mean, 1e-6)
        assert close(layer.moving_variance, variance, 1e-4)
        assert close(y, (x - mean) / np.sqrt(variance + 1e-3), 2 * unit)


@ranks(2)
def test_a_large_mean_takes_no_digits_from_a_small_variance():
    hvd.init()
    x = (1e4 + draw(500, CHANNELS, seed=hvd.rank())).astype(np.float32)
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(tf.constant(x), training=True)
    everywhere = np.concatenate(hvd.allgather_object(x)).astype(np.float64)
    assert close(layer.moving_variance, everywhere.var(0), 1e-5)


@ranks(2)
@each_mode
def test_inference_and_frozen_layers_exchange_nothing(mode):
    hvd.init()
    layer, plain = make_layer(), keras.layers.BatchNormalization(dtype="float64")
    plain.build([None, None, None, CHANNELS])
    state = [gamma, beta, mean, variance] = [draw(CHANNELS, seed=seed) ** 2 for seed in range(4)]
    for each in (layer, plain):
        each.set_weights(state)
    x = tf.constant(draw(2, 1, 1, CHANNELS))
    if hvd.rank() == 0:  # alone
        expected = (x - mean) / np.sqrt(variance + 1e-3) * gamma + beta
        assert close(in_mode(mode, lambda: layer(x))(), expected, 1e-12)
        assert close(in_mode(mode, lambda: layer(x, training=False))(), expected, 1e-12)
        layer.trainable = False
        assert close(in_mode(mode, lambda: layer(x, training=True))(), expected, 1e-12)
    assert close(layer.moving_mean, mean, 0.0)
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [2.0]


@ranks(2)
def test_fit(size):
    """Sharded over the ranks, `fit` gives the layer the values of one process with all data."""
    hvd.init()
    x = draw(12 * size, 4).astype(np.float32)

    def train(layer, x, batch_size, **options):
        model = keras.Sequential([keras.Input((4,)), layer])
        layer.gamma.assign([1.0, 2.0, 3.0, 4.0])
        model.compile(keras.optimizers.SGD(0.0), loss="mse", **options)
        model.fit(x, x, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        assert not model.jit_compile
        return model

    per_rank = x.reshape(3, size, 4, 4)[:, hvd.rank()].reshape(12, 4)
    model = train(hvd.SyncBatchNormalization(momentum=0.5), per_rank, 4)
    alone = train(keras.layers.BatchNormalization(momentum=0.5), x, 4 * size, jit_compile=False)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        assert close(found, expected, 1e-5)
    with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
        train(hvd.SyncBatchNormalization(), per_rank, 4, jit_compile=True)


@ranks(2)
def test_an_error_names_the_line_that_called_the_layer():
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError, match=r"at test_sync_batch_norm\.py:\d+ on"):
        hvd.SyncBatchNormalization()(tf.zeros((2, 3 + hvd.rank())), training=True)


@ranks(1)
def test_what_is_refused(monkeypatch):
    hvd.init()
    for options, said in (
        ({"fused": True}, "no fused=True"),
        ({"renorm": True}, "no renorm=True"),
        ({"virtual_batch_size": 4}, "no virtual_batch_size=4"),
        ({"axis": [1, 2]}, "takes one axis"),
    ):
        with pytest.raises(ValueError, match=said):
            hvd.SyncBatchNormalization(**options)
    assert hvd.SyncBatchNormalization(axis=[2], fused=False).axis == 2
    layer, x = hvd.SyncBatchNormalization(), tf.Variable([[1.0], [3.0]])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        slope = tape.gradient(loss, x)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        outer.gradient(slope, x)
    monkeypatch.setattr(tf.keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="which is torch; set KERAS_BACKEND=tensorflow"):
        hvd.SyncBatchNormalization()
