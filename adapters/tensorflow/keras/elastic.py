"""Training with ``tf.keras`` that continues after a failure: ``hvd.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.keras import _elastic
from hvdlite.keras._callbacks import complete
from hvdlite.keras._elastic import *  # noqa: F403

__all__ = _elastic.__all__

globals().update(complete(_elastic, tf.keras.callbacks, __name__))
