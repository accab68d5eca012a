"""Keras 3 on PyTorch: in jobs of their own, because Keras settles on a framework once."""

import importlib
import warnings

import pytest

from tests.harness import ranks

pytest.importorskip("keras")
pytest.importorskip("torch")

# Keras' own, with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@ranks(2, 3, fresh=True, timeout=400, env={"KERAS_BACKEND": "torch"})
@pytest.mark.parametrize("module", ["checks", "more_checks"])
def test_training(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        module = importlib.import_module(f"tests.keras.{module}")
        import hvdlite.keras as hvd
    hvd.init()
    for check in module.CHECKS:
        print(check.__name__, flush=True)
        check()
