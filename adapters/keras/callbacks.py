"""Callbacks for ``fit`` of Keras 3; all ranks use the same ones in the same order."""

from __future__ import annotations

from hvdlite.keras import _callbacks
from hvdlite.keras._callbacks import complete
from hvdlite.keras._keras3 import keras

_keras = keras.callbacks

BroadcastGlobalVariablesCallback = complete(
    _callbacks.BroadcastGlobalVariablesCallback, _keras.Callback, __name__
)
MetricAverageCallback = complete(_callbacks.MetricAverageCallback, _keras.Callback, __name__)
LearningRateScheduleCallback = complete(
    _callbacks.LearningRateScheduleCallback, _keras.Callback, __name__
)
LearningRateWarmupCallback = complete(
    _callbacks.LearningRateWarmupCallback, _keras.Callback, __name__
)
BestModelCheckpoint = complete(_callbacks.BestModelCheckpoint, _keras.ModelCheckpoint, __name__)
