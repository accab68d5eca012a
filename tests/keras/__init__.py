"""Tests of Keras 3 on TensorFlow and on PyTorch, and of legacy Keras.

Keras chooses its framework on import. Tests for several frameworks are therefore functions in
modules named ``*_checks.py``, which only ranks import; `test_backends` runs them.
"""

import ast
import importlib
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def needs(*modules):
    return pytest.mark.skipif(
        not all(map(find_spec, modules)), reason=f"needs {' and '.join(modules)}"
    )


def checks_in(*modules, package="keras", fast=("",), slow=()):
    """Return the checks of modules as parameters for pytest.

    Args:
        *modules: The modules' names, without ``_checks``.
        package: The folder in ``tests`` that they lie in.
        fast: Words in the names of those that a fast selection of tests (``--fast``) runs.
        slow: Words in the names of those that it leaves out nevertheless.
    """

    def has(words, name):
        return any(word in name for word in words)

    names = [
        f"{package}.{module}_checks.{node.name}"
        for module in modules
        for node in ast.parse((TESTS / package / f"{module}_checks.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return [
        pytest.param(
            name, marks=() if has(fast, name) and not has(slow, name) else pytest.mark.slow
        )
        for name in names
    ]


def run(name):
    """Run a check in this process, which is a rank."""
    package, module, function = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks that are imported
        found = importlib.import_module(f"tests.{package}.{module}")
        import hvdlite
    hvdlite.init()
    getattr(found, function)()
