"""Keep the name under which `hvdlite.compression` was imported before."""

from __future__ import annotations

from hvdlite.compression import *  # noqa: F403
from hvdlite.compression import __all__ as __all__
