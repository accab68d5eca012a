"""The functions of ``horovod.tensorflow.util`` that scripts use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf


def refs_to_vars(refs: Iterable[Any]) -> list[Any]:
    """Return the variables of hashable references; other values are kept."""
    return [ref.deref() if hasattr(ref, "deref") else ref for ref in refs]


def vars_to_refs(vars: Any) -> Any:
    """Return hashable references to variables, in tuples where these are in lists."""
    if isinstance(vars, Sequence):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref() if hasattr(vars, "ref") else vars


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Any:
    return tf.function(function)


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.lru_cache(maxsize=None)(function)
