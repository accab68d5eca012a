"""Training with Keras 3 that continues after a failure: ``hvd.elastic``."""

from __future__ import annotations

from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.keras import _elastic
from hvdlite.keras._callbacks import complete
from hvdlite.keras._elastic import KerasState
from hvdlite.keras._keras3 import keras

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
    complete(mixin, keras.callbacks.Callback, __name__) for mixin in _elastic.CALLBACKS
)
