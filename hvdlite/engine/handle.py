"""What a caller holds while an operation is on its way."""

from __future__ import annotations

import threading
from typing import Any


class Handle:
    """The future result of one operation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Deliver the result, or the error that took its place."""
        self._result, self._error = result, error
        self._finished.set()

    def done(self) -> bool:
        """Whether the operation has ended, with a result or an error."""
        return self._finished.is_set()

    def wait(self) -> Any:
        """Block until the operation has ended, and return its result.

        The wait ends: the lane that runs the operation reports a stall, and ends it
        where it has been told to.

        Raises:
            HorovodInternalError: the operation failed, on this rank or another.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._result
