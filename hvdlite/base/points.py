"""The points that this rank gets to, for who has to know of them (`hvdlite.tools.rehearsal`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Called with the name of a point, and at ``checkpoint`` with the path of the new file; None:
#: nobody has to know.
reach: Callable[..., object] | None = None

#: Called with an operation that this rank is about to submit; None: nobody has to know.
submit: Callable[[Any], object] | None = None
