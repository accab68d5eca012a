"""Training with Keras 3 that continues after a failure: ``hvd.elastic``."""

from __future__ import annotations

from hvdlite.keras import _elastic
from hvdlite.keras._callbacks import complete
from hvdlite.keras._elastic import *  # noqa: F403
from hvdlite.keras._keras3 import keras

__all__ = _elastic.__all__

globals().update(complete(_elastic, keras.callbacks, __name__))
