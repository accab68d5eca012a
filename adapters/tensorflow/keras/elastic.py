"""Training with ``tf.keras`` that continues after a failure: ``hvd.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.keras import _elastic
from hvdlite.keras._callbacks import complete
from hvdlite.keras._elastic import KerasState

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

CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = (
    complete(mixin, tf.keras.callbacks.Callback, __name__) for mixin in _elastic.CALLBACKS
)
