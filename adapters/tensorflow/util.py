"""The functions of ``horovod.tensorflow.util`` that scripts use."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
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


_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function
_cache = functools.cache
