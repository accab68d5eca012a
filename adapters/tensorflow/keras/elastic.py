"""Training with ``tf.keras`` that goes on after a failure: ``hvd.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdlite._keras.elastic import make_callbacks
from hvdlite.elastic import HostUpdate, ObjectState, State
from hvdlite.tensorflow.elastic import TensorFlowKerasState, run

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

KerasState = TensorFlowKerasState

CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = make_callbacks(
    tf.keras.callbacks.Callback, __name__
)
