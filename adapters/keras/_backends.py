"""The framework below Keras, by the environment; this imports no Keras."""

from __future__ import annotations

import os

_BACKENDS = ("tensorflow", "torch")
uses_legacy_keras = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")


def check_backend(name: str | None) -> None:
    """Refuse a framework below Keras 3 whose gradients cannot be exchanged."""
    if name and name not in _BACKENDS:
        raise ImportError(
            f"hvdlite exchanges gradients where Keras runs on TensorFlow or PyTorch, and here it "
            f"runs on {name!r}; set the environment variable KERAS_BACKEND to tensorflow or torch "
            "before Keras is imported"
        )
