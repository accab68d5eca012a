"""Tests of Keras 3 on TensorFlow and on PyTorch, and of legacy Keras.

Keras chooses its framework on import. Tests for several frameworks are therefore functions in
modules named ``*_checks.py``, which only ranks import; `test_backends` runs them.
"""

import ast
import contextlib
import importlib
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import hvdlite
from hvdlite import collectives
from hvdlite.engine import runtime
from tests.logs import logged

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
    hvdlite.init()
    getattr(found, function)()


@contextlib.contextmanager
def exchanges():
    """Return a list that gets the name of every operation on the gradient lane."""
    lane = runtime.engine().gradients
    count, submit, run = [], lane.submit, lane.run

    def counted(original):
        def wrapper(operation, *args, **kwargs):
            count.append(operation.name)
            return original(operation, *args, **kwargs)

        return wrapper

    lane.submit, lane.run = counted(submit), counted(run)
    try:
        yield count
    finally:
        lane.submit, lane.run = submit, run


@contextlib.contextmanager
def not_finite(reaction):
    """Start a world with a value of HVDLITE_NOT_FINITE; return a list of the steps left out."""
    hvdlite.shutdown()
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDLITE_NOT_FINITE", reaction)
        try:
            hvdlite.init()
            yield told
        finally:
            hvdlite.shutdown()
    told[:] = [text for text in told if text.startswith("this step is left out on all ranks")]


def flat(weights):
    return np.concatenate([np.asarray(weight, np.float64).ravel() for weight in weights])


def same_on_all_ranks(weights):
    """Return whether the weights are bitwise the same on all ranks."""
    content = b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)
    return len(set(collectives.allgather_object(content))) == 1


def close(found, expected, tolerance=1e-5):
    found, expected = flat(found), flat(expected)
    return np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)
