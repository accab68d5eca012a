"""hvdlite for Keras 3: ``import hvdlite.keras as hvd``.

It works on TensorFlow and on PyTorch, whichever Keras runs on (``KERAS_BACKEND``).
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hvdlite.keras._backends import check_backend as _check_backend
from hvdlite.keras._backends import uses_legacy_keras as _uses_legacy_keras

if find_spec("keras") is None and not _uses_legacy_keras:
    raise ImportError(
        "hvdlite.keras needs Keras 3, which cannot be found; install it with "
        "`pip install hvdlite[keras]`"
    )

if TYPE_CHECKING:
    from hvdlite.keras._public import *  # noqa: F403


# Names are resolved on first use: `hvdlite.tensorflow` and legacy Keras share the private modules
# of this package, and must not import Keras 3.
def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_backend(os.environ.get("KERAS_BACKEND"))  # Keras itself may lack the framework
    from hvdlite.keras import _public

    return getattr(_public, name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
