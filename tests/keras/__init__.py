"""Tests of Keras 3 on TensorFlow and on PyTorch, and of legacy Keras.

Keras chooses its framework on import. Tests for several frameworks are therefore functions in
modules named ``*_checks.py``, which only ranks import; `test_backends` runs them.
"""

import ast
import importlib
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def checks_in(*modules, only=("",), fast=("",), slow=()):
    """Return the checks of modules as parameters for pytest.

    Args:
        *modules: The modules' names, without ``_checks``.
        only: Words in the names of the checks to return.
        fast: Words in the names of those that a fast selection of tests (``--fast``) runs.
        slow: Words in the names of those that it leaves out nevertheless.
    """

    def has(words, name):
        return any(word in name for word in words)

    names = [
        f"{module}_checks.{node.name}"
        for module in modules
        for node in ast.parse((FOLDER / f"{module}_checks.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and has(only, node.name)
    ]
    return [
        pytest.param(
            name, marks=() if has(fast, name) and not has(slow, name) else pytest.mark.slow
        )
        for name in names
    ]


def run(name):
    """Run a check in this process, which is a rank."""
    module, function = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        found = importlib.import_module(f"tests.keras.{module}")
        import hvdlite
    hvdlite.init()
    getattr(found, function)()
