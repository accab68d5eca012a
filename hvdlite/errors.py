"""The exceptions of hvdlite.

::

    RuntimeError
    ├── HorovodInternalError       a collective failed, or the ranks disagree
    │   ├── RankGoneError          another rank has ended or has given up
    │   ├── MismatchError          two ranks submitted different things under one name
    │   └── GradientError          values that cannot be exchanged in the way asked for
    ├── HostsUpdatedInterrupt      the set of hosts changed (elastic training)
    └── LauncherError              processes that were started together are no job to MPI
    ValueError
    ├── NotInitializedError        a call before ``init()``
    ├── UnsupportedError           what a call does not do; also a NotImplementedError
    ├── SettingsError              an environment variable that cannot be read
    ├── StartError                 ``hvdliterun`` or ``hvdlite.run`` cannot start a job
    └── CheckpointError            a checkpoint that is damaged, foreign or does not fit

A mistake in the caller's own arguments is a plain ``ValueError`` (or ``TypeError``),
raised at once and on the caller's rank only.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed, a rank is gone, or the ranks disagree."""


class RankGoneError(HorovodInternalError):
    """Another rank has ended, or has said that it takes part in nothing any more."""


class MismatchError(HorovodInternalError):
    """Two ranks submitted different operations under the same name, or train different replicas."""


class GradientError(HorovodInternalError):
    """Values cannot be exchanged in the way that is asked for.

    A gradient is not a number, say, or factors take integers out of the range of their type.

    All ranks raise it together, in the midst of an operation that they have all left in the same
    place, so that communication goes on.
    """


class UnsupportedError(ValueError, NotImplementedError):
    """An argument that is valid elsewhere asks for what a call does not do.

    As Horovod's errors for it, it is also a RuntimeError.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts has changed; training goes on after a re-initialisation.

    Args:
        skip_sync: True where the state needs no synchronisation (hosts were only removed).
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class LauncherError(RuntimeError):
    """Several processes were started together, and MPI takes each for a job of its own."""


class NotInitializedError(ValueError):
    """A call that needs the world came before ``init()``."""

    def __init__(self) -> None:
        super().__init__("hvdlite has not been initialized; call hvd.init() first")


class SettingsError(ValueError):
    """An environment variable holds a value that hvdlite cannot read."""


class StartError(ValueError):
    """``hvdliterun`` or ``hvdlite.run`` cannot start a job.

    Args:
        message: one line that says what was found and what to do.
        code: exit code of the launcher (2, or 126 and 127 as in a shell).
    """

    USAGE, NOT_EXECUTABLE, NOT_FOUND = 2, 126, 127

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


class CheckpointError(ValueError):
    """A checkpoint is damaged, foreign, or does not fit what it is loaded into."""
