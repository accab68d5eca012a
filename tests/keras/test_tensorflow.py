"""Keras 3 on TensorFlow: in a job that is shared with other tests of TensorFlow."""

import subprocess
import sys

import pytest

from tests.harness import mpirun, ranks

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.keras as hvd
import hvdlite.tensorflow as tf_hvd
import hvdlite.tensorflow.keras as tf_keras_hvd
from tests.keras import checks, more_checks, schedule_checks, tensorflow_checks
from tests.keras.counting import exchanges

# Keras' own, with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@ranks(3, timeout=240)
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_training(check):
    hvd.init()
    check()


@ranks(2, timeout=240)
@pytest.mark.parametrize(
    "check",
    [*more_checks.CHECKS, *tensorflow_checks.CHECKS, *schedule_checks.CHECKS],
    ids=lambda check: check.__name__,
)
def test_training_further(check):
    hvd.init()
    check()


@ranks(2)
def test_optimizers_of_tensorflow_1():
    hvd.init()

    def train(optimizer, values):
        weight = tf.Variable([1.0, 2.0])
        for value in values:
            optimizer.minimize(lambda value=value: tf.reduce_sum(weight * value), var_list=[weight])
        return weight.numpy()

    kind = tf.compat.v1.train.MomentumOptimizer
    wrapped = tf_hvd.DistributedOptimizer(kind(0.1, 0.9))
    assert isinstance(wrapped, kind)
    with exchanges() as count:
        found = train(wrapped, [1.0 + hvd.rank(), 3.0 - hvd.rank()])
    assert len(count) == 2
    assert found.tolist() == train(kind(0.1, 0.9), [1.5, 2.5]).tolist()
    with pytest.raises(ValueError, match="needs a Keras optimizer"):
        tf_hvd.DistributedOptimizer(kind(0.1, 0.9), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="it needs a Keras optimizer"):
        tf_hvd.DistributedOptimizer(kind(0.1, 0.9), schedule=hvd.Schedule.LocalSGD(every=2))
    with pytest.raises(ValueError, match="wrap it once"):
        tf_hvd.DistributedOptimizer(wrapped)
    with pytest.raises(TypeError, match="expected a Keras optimizer, found float"):
        tf_hvd.DistributedOptimizer(0.1)


def test_the_adapter_of_tf_keras_has_all_that_the_one_of_keras_has():
    assert set(hvd.__all__) <= set(tf_keras_hvd.__all__)
    for adapter in (hvd, tf_keras_hvd):
        assert all(hasattr(adapter, name) for name in adapter.__all__)
    names = {name for name in vars(hvd.callbacks) if name.endswith(("Callback", "Checkpoint"))}
    assert len(names) == 5
    assert all(getattr(tf_keras_hvd.callbacks, name).__doc__ for name in names)


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_other_backends_are_refused(backend):
    source = (
        f"import keras; keras.backend.backend = lambda: {backend!r}\nfrom hvdlite.keras import init"
    )
    done = _python(source, KERAS_BACKEND="torch")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: hvdlite.keras exchanges gradients where Keras runs on")
    assert f"'{backend}'" in last
    assert "KERAS_BACKEND" in last


def _python(source, **variables):
    return subprocess.run(
        [sys.executable, "-c", source],
        env=mpirun.environment(variables),
        capture_output=True,
        text=True,
    )
