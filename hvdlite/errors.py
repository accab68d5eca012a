"""The exceptions of hvdlite.

::

    RuntimeError
    ├── HorovodInternalError       a collective failed, or the ranks disagree
    │   ├── RankGoneError          another rank has ended or has given up
    │   ├── MismatchError          two ranks submitted different things under one name
    │   └── GradientError          values that cannot be exchanged in the way asked for
    │       └── NotFiniteError     averages that are NaN or infinite, where they are refused
    ├── HostsUpdatedInterrupt      the set of hosts changed (elastic training)
    └── LauncherError              a process that is not a rank of the job it should be in
    ValueError
    ├── NotInitializedError        a call before ``init()``
    ├── UnsupportedError           a request that a call does not support; a NotImplementedError
    ├── SettingsError              an environment variable that cannot be read
    ├── StartError                 ``hvdliterun`` or ``hvdlite.run`` cannot start a job
    └── CheckpointError            a checkpoint that is damaged, foreign or does not fit

A mistake in the caller's own arguments is a plain ``ValueError`` (or ``TypeError``),
raised at once and on the caller's rank only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class HorovodInternalError(RuntimeError):
    """A failed collective, a rank that is gone, or ranks that disagree."""


class RankGoneError(HorovodInternalError):
    """Another rank has ended, or has announced that it takes part in nothing any more."""


class MismatchError(HorovodInternalError):
    """Two ranks submitted different operations under the same name, or train different replicas."""


class GradientError(HorovodInternalError):
    """Values that cannot be exchanged as requested.

    For example, a gradient is not a number, or factors take integers out of the range of their
    type. All ranks raise it together and leave the operation at the same point, so that
    communication goes on.
    """


class NotFiniteError(GradientError):
    """Averages of gradients that are NaN or infinite, where HVDLITE_NOT_FINITE refuses them.

    The message names the parameters and the ranks; all ranks raise it.
    """


class UnsupportedError(ValueError, NotImplementedError):
    """A valid argument that this call does not support.

    Like Horovod's errors for this, it is also a RuntimeError.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """A change of the hosts; training goes on after a re-initialisation.

    Args:
        skip_sync: True if the state needs no synchronisation (hosts were only removed).
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class LauncherError(RuntimeError):
    """A process that would not be a rank of the job that its user expects.

    Several processes were started together, and MPI takes each for a job of its own; or a rank has
    started this process, which has no rank of its own.
    """


class NotInitializedError(ValueError):
    """A call before ``init()`` that needs the world."""

    def __init__(self) -> None:
        super().__init__("hvdlite has not been initialized; call hvd.init() first")


class SettingsError(ValueError):
    """An environment variable with a value that hvdlite cannot read."""


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
    """A checkpoint that is damaged, foreign, or does not fit its target."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def by_value(texts: Mapping[int, str]) -> list[str]:
    """Return for each different text which ranks have it: ``["3 on ranks 0, 2", "4 on rank 1"]``.

    Args:
        texts: by rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [f"{text} on {ranks_text(each)}" for text, each in ranks.items()]
