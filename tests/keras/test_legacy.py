"""Legacy Keras: in jobs of their own, because ``tf.keras`` settles on one once."""

import importlib
import warnings

import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")
pytest.importorskip("tf_keras")


@ranks(2, fresh=True, timeout=400, env={"TF_USE_LEGACY_KERAS": "1"})
def test_training():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        checks = importlib.import_module("tests.keras.legacy_checks")
        import hvdlite
    hvdlite.init()
    for check in checks.CHECKS:
        print(check.__name__, flush=True)
        check()
