"""Test Keras 3 on TensorFlow and on PyTorch, and legacy Keras, each in separate jobs."""

import subprocess
import sys

import pytest

from tests.harness import mpirun, ranks
from tests.keras import checks_in, needs, run

# Keras' own, with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

KERAS_3 = ("common", "optimizer", "loop", "callback", "seed")
SLOW = """
saved embeddings clip decay before_its adds_up_and_one discarded
without_xla learning_rates_follow in_one_execution not_finite what_is_made_from backward_passes
every_adapter overflow seeded_layers around_accumulation that_part own_loss test_compression
train_on_batch adapted_to
""".split()  # noqa: SIM905 - a line for each word would be longer than the tests


@needs("keras", "tensorflow")
@ranks(2)
@pytest.mark.parametrize("check", checks_in(*KERAS_3, "tensorflow", slow=SLOW))
def test_tensorflow(check):
    run(check)


@needs("keras", "torch")
@ranks(2, env={"KERAS_BACKEND": "torch"})
@pytest.mark.parametrize("check", checks_in(*KERAS_3, fast=()))
def test_torch(check):
    run(check)


@needs("tensorflow", "tf_keras")
@ranks(2, env={"TF_USE_LEGACY_KERAS": "1"})
@pytest.mark.parametrize("check", checks_in("common", "legacy", fast=()))
def test_legacy(check):
    run(check)


@pytest.mark.slow
@needs("keras", "tensorflow", "torch", "tf_keras")
@pytest.mark.parametrize(
    ("environment", "source", "words"),
    [
        (
            {"KERAS_BACKEND": "torch"},
            "import keras; keras.backend.backend = lambda: 'jax'; from hvdlite.keras import init",
            ("ImportError: hvdlite exchanges gradients where", "'jax'", "KERAS_BACKEND"),
        ),
        # Keras cannot be imported where its framework is missing.
        *(
            (
                {"KERAS_BACKEND": "jax"},
                f"import {module} as hvd; hvd.init()",
                ("ImportError: hvdlite exchanges gradients where", "'jax'", "KERAS_BACKEND"),
            )
            for module in ("hvdlite.keras", "hvdlite.tensorflow.keras")
        ),
        (
            {"TF_USE_LEGACY_KERAS": "1"},
            "import hvdlite.keras as hvd, tensorflow as tf; hvd.init();"
            "hvd.DistributedOptimizer(tf.keras.optimizers.Adam())",
            ("TypeError: expected a Keras optimizer, found Adam", "hvdlite.tensorflow.keras"),
        ),
    ],
)
def test_other_kinds_of_keras_are_refused(environment, source, words):
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=mpirun.environment(environment),
        capture_output=True,
        text=True,
    )
    last = next(line for line in done.stderr.splitlines() if "Error: " in line)
    assert all(word in last for word in words), done.stderr
