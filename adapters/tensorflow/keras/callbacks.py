"""Callbacks for ``fit`` of ``tf.keras``; all ranks use the same ones in the same order."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.keras import _callbacks
from hvdlite.keras._callbacks import *  # noqa: F403

__all__ = _callbacks.__all__

globals().update(_callbacks.complete(_callbacks, tf.keras.callbacks, __name__))
