"""Callbacks for ``fit`` of Keras 3; all ranks use the same ones in the same order."""

from __future__ import annotations

from hvdlite.keras import _callbacks
from hvdlite.keras._keras3 import keras


class BroadcastGlobalVariablesCallback(
    _callbacks.BroadcastGlobalVariables, keras.callbacks.Callback
):
    __doc__ = _callbacks.BroadcastGlobalVariables.__doc__


class MetricAverageCallback(_callbacks.MetricAverage, keras.callbacks.Callback):
    __doc__ = _callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(_callbacks.LearningRateSchedule, keras.callbacks.Callback):
    __doc__ = _callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(_callbacks.LearningRateWarmup, keras.callbacks.Callback):
    __doc__ = _callbacks.LearningRateWarmup.__doc__


class BestModelCheckpoint(_callbacks.RankZeroCheckpoint, keras.callbacks.ModelCheckpoint):
    __doc__ = _callbacks.RankZeroCheckpoint.__doc__
