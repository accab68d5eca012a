"""Run the checks of elastic callbacks with each Keras; this file imports none of them."""

import pytest

from tests.harness import ranks
from tests.keras import checks_in, needs, run

PATIENCE = 240.0  # to import TensorFlow on a busy machine takes a minute
# Keras' own, with numpy 2.
warns = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
every_check = pytest.mark.parametrize("check", checks_in("keras", package="elastic", fast=()))


@warns
@needs("tensorflow", "keras")
@ranks(2, timeout=PATIENCE)
@every_check
def test_callbacks(check):
    run(check)


@warns
@needs("torch", "keras")
@ranks(2, timeout=PATIENCE, env={"KERAS_BACKEND": "torch"})
@every_check
def test_callbacks_on_torch(check):
    run(check)


@warns
@needs("tf_keras")
@ranks(2, timeout=PATIENCE, env={"TF_USE_LEGACY_KERAS": "1"})
@every_check
def test_callbacks_of_legacy_keras(check):
    run(check)
