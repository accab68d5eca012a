"""Callbacks for ``fit`` of ``tf.keras``; all ranks use the same ones in the same order."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.keras import _callbacks


class BroadcastGlobalVariablesCallback(
    _callbacks.BroadcastGlobalVariables, tf.keras.callbacks.Callback
):
    __doc__ = _callbacks.BroadcastGlobalVariables.__doc__


class MetricAverageCallback(_callbacks.MetricAverage, tf.keras.callbacks.Callback):
    __doc__ = _callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(_callbacks.LearningRateSchedule, tf.keras.callbacks.Callback):
    __doc__ = _callbacks.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(_callbacks.LearningRateWarmup, tf.keras.callbacks.Callback):
    __doc__ = _callbacks.LearningRateWarmup.__doc__


class BestModelCheckpoint(_callbacks.RankZeroCheckpoint, tf.keras.callbacks.ModelCheckpoint):
    __doc__ = _callbacks.RankZeroCheckpoint.__doc__
