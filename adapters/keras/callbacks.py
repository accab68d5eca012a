"""Callbacks for ``fit`` of Keras 3; all ranks use the same ones in the same order."""

from __future__ import annotations

from hvdlite.keras._callbacks import public_callbacks
from hvdlite.keras._keras3 import keras

(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = public_callbacks(keras.callbacks, __name__)
