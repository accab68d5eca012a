"""Tests of Keras 3 on TensorFlow and on PyTorch, and of legacy Keras.

Keras settles on a framework when it is imported, so tests that run on several are functions of
modules named ``*_checks.py``, which only ranks import. `test_backends` runs them.
"""

import ast
import importlib
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def checks_in(*modules, only=("",), fast=()):
    """Return the checks of modules as parameters for pytest.

    Args:
        *modules: The modules' names, without ``_checks``.
        only: Words in the names of the checks to return.
        fast: Words in the names of the checks that a fast selection of tests runs; all others are
            marked slow. None: all of them.
    """
    names = [
        f"{module}_checks.{node.name}"
        for module in modules
        for node in ast.parse((FOLDER / f"{module}_checks.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and any(word in node.name for word in only)
    ]
    return [pytest.param(name, marks=_marks(name, fast)) for name in names]


def _marks(name, fast):
    is_fast = fast is None or any(word in name for word in fast)
    return () if is_fast else pytest.mark.slow


def run(name):
    """Run a check in this process, which is a rank."""
    module, function = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        found = importlib.import_module(f"tests.keras.{module}")
        import hvdlite
    hvdlite.init()
    getattr(found, function)()
