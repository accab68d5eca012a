"""Callbacks for ``fit``; all ranks have the same ones, in the same order."""

from __future__ import annotations

import keras

from hvdlite._keras import callbacks as _callbacks


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
