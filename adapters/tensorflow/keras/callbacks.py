"""Callbacks for ``fit`` of ``tf.keras``; all ranks use the same ones in the same order."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.keras._callbacks import public_callbacks

(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    BestModelCheckpoint,
) = public_callbacks(tf.keras.callbacks, __name__)
