"""Test schedules with Keras 3 on TensorFlow and on PyTorch, and with legacy Keras."""

from functools import partial

import pytest

from tests.harness import ranks
from tests.keras import checks_in, needs, run

# Keras' own, with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
CHECKS = partial(checks_in, package="schedule")


@needs("keras", "tensorflow")
@ranks(2)
@pytest.mark.parametrize("check", CHECKS("keras", fast=["local_layers", "refuse"]))
def test_tensorflow(check):
    run(check)


@needs("keras", "torch")
@ranks(2, env={"KERAS_BACKEND": "torch"})
@pytest.mark.parametrize("check", CHECKS("keras", fast=()))
def test_torch(check):
    run(check)


@needs("tensorflow", "tf_keras")
@ranks(2, env={"TF_USE_LEGACY_KERAS": "1"})
@pytest.mark.parametrize("check", CHECKS("legacy_keras", fast=()))
def test_legacy(check):
    run(check)
