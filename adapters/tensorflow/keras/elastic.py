"""Training with ``tf.keras`` that continues after a failure: ``hvd.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.keras import _elastic
from hvdlite.keras._callbacks import complete
from hvdlite.keras._elastic import *  # noqa: F403

__all__ = _elastic.__all__

globals().update(
    (mixin.__name__, complete(mixin, tf.keras.callbacks.Callback, __name__))
    for mixin in _elastic.CALLBACKS
)
