"""Training with Keras 3 that goes on after a failure: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdlite import elastic
from hvdlite._keras.elastic import ModelState, make_callbacks
from hvdlite.elastic import HostUpdate, ObjectState, State

__all__ = [
    "CommitStateCallback",
    "HostUpdate",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ModelState):
    """The state of a Keras 3 model, its optimizer, and other attributes, on any backend.

    Args:
        model: a built one; the attribute ``model``.
        optimizer: None: the model's own; the attribute ``optimizer``. It is built, if it is not.
        **kwargs: the other attributes, and their values at the start: ``batch=0, epoch=0``.

    Raises:
        ValueError: the model has not been built, or the class has an attribute or a method of
            such a name.
    """


CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = make_callbacks(
    keras.callbacks.Callback, __name__
)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on after failures: `hvdlite.elastic.run` for this backend."""
    if keras.backend.backend() == "tensorflow":
        from hvdlite.tensorflow import elastic as tensorflow_elastic

        return tensorflow_elastic.run(func)
    return elastic.run(func)
