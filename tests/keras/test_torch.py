"""Keras 3 on PyTorch: in jobs of their own, because Keras settles on a framework once."""

import importlib
import warnings

import pytest

from tests.harness import ranks

pytest.importorskip("keras")
pytest.importorskip("torch")

# Keras' own, with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


# Each at one number of ranks, the other one on TensorFlow: a job takes half a minute.
@ranks(2, fresh=True, timeout=400, env={"KERAS_BACKEND": "torch"})
def test_training():
    run_checks("checks")


@ranks(3, fresh=True, timeout=400, env={"KERAS_BACKEND": "torch"})
def test_training_further():
    run_checks("more_checks", "schedule_checks")


def run_checks(*modules):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        imported = [importlib.import_module(f"tests.keras.{module}") for module in modules]
        import hvdlite.keras as hvd
    hvd.init()
    for check in (check for module in imported for check in module.CHECKS):
        print(check.__name__, flush=True)
        check()
