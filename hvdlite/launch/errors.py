"""What goes wrong before a job runs."""

from __future__ import annotations

USAGE = 2
NOT_EXECUTABLE = 126
NOT_FOUND = 127


class LaunchError(ValueError):
    """The job cannot be started.

    Args:
        message: one line that says what was found and what to do.
        code: exit code of the launcher (2, or 126 and 127 as in a shell).
    """

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code
