"""Callbacks for ``fit`` of Keras 3; all ranks use the same ones in the same order."""

from __future__ import annotations

from hvdlite.keras import _callbacks
from hvdlite.keras._callbacks import *  # noqa: F403
from hvdlite.keras._keras3 import keras

__all__ = _callbacks.__all__

globals().update(_callbacks.complete(_callbacks, keras.callbacks, __name__))
