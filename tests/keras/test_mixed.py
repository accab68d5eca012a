"""Test a job in which a rank on PyTorch and a rank on TensorFlow train one model."""

import hashlib
import os
import warnings
from importlib.util import find_spec

import numpy as np
import pytest

from tests.harness import ranks

NEEDED = ["keras", "tensorflow", "torch"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Not imported here: each rank has yet to say on what Keras is to run.
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]

SAMPLES, STEPS = 32, 6


@pytest.mark.slow
@ranks(2, fresh=True, timeout=400, env={"HVDLITE_CHECK_RANKS": "warn"})  # they round differently
def test_pytorch_and_tensorflow():
    os.environ["KERAS_BACKEND"] = ["torch", "tensorflow"][_rank()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        import keras

        import hvdlite.keras as hvd
    hvd.init()
    assert keras.backend.backend() == ["torch", "tensorflow"][hvd.rank()]
    for compression in _compressions(hvd.Compression):
        model = _model(keras)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), compression=compression
        )
        model.compile(optimizer, "mse")
        losses = [_step(model, step, hvd) for step in range(STEPS)]
        weights = [np.asarray(weight) for weight in model.get_weights()]
        digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
        gathered = hvd.allgather_object((digest, losses))
        # SGD's own arithmetic is not the same to the bit in both frameworks.
        for first, second in zip(*hvd.allgather_object(weights), strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)
        assert np.mean([losses[-1] for _, losses in gathered]) < np.mean(
            [losses[0] for _, losses in gathered]
        )


def _rank():
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def _compressions(kinds):
    return [kinds.none, kinds.fp16, kinds.ErrorFeedback(kinds.bf16)]


def _model(keras):
    model = keras.Sequential(
        [
            keras.layers.Input((5,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.Dense(2, name="out"),
        ],
        name="net",
    )
    draw = np.random.default_rng(0).standard_normal
    model.set_weights([0.3 * draw(weight.shape) for weight in model.get_weights()])
    return model


def _step(model, step, hvd):
    draw = np.random.default_rng(step % 2)
    x = draw.standard_normal((SAMPLES, 5)).astype(np.float32)
    y = np.tanh(x[:, :2] + x[:, 2:4])
    own = slice(hvd.rank(), None, hvd.size())
    return float(model.train_on_batch(x[own], y[own]))
