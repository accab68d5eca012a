"""Training with ``tf.keras`` that continues after a failure: ``hvd.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.elastic import HostUpdate, ObjectState, State
from hvdlite.keras import _elastic
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


class CommitStateCallback(_elastic.CommitState, tf.keras.callbacks.Callback):
    __doc__ = _elastic.CommitState.__doc__


class UpdateBatchStateCallback(_elastic.UpdateBatchState, tf.keras.callbacks.Callback):
    __doc__ = _elastic.UpdateBatchState.__doc__


class UpdateEpochStateCallback(_elastic.UpdateEpochState, tf.keras.callbacks.Callback):
    __doc__ = _elastic.UpdateEpochState.__doc__
