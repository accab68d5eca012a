"""What a rank tells of an exception, and how that is raised where `hvdlite.run` was called."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.failures import chain
from hvdlite.launch.parcel import Part, pack, unpack


class RemoteTraceback(Exception):  # noqa: N818 - not an error, but where one comes from
    """The cause of an exception that came from a rank; its text is the traceback there.

    Attributes:
        rank: which rank.
        host: on which host.
    """

    def __init__(self, rank: int, host: str, text: str) -> None:
        super().__init__(f"on rank {rank} (host {host}):\n{text}")
        self.rank = rank
        self.host = host


class Account(NamedTuple):
    """What a rank sends about the exception that has ended it.

    Attributes:
        host: where it ran.
        doing: what it did.
        summary: the exception in one line.
        text: the traceback.
        pickled: the exception; empty where it cannot be pickled.
        is_consequence: whether it says that another rank has gone.
        is_callers: whether it is to be raised in the caller as it is.
    """

    host: str
    doing: str
    summary: str
    text: str
    pickled: Sequence[Part]
    is_consequence: bool
    is_callers: bool

    @classmethod
    def of(cls, error: BaseException, host: str, doing: str, is_callers: bool) -> Account:
        """Describe an exception that was caught on this rank.

        Args:
            error: the exception.
            host: this host.
            doing: what was being done, as in "cannot load the function".
            is_callers: whether the caller shall see it as it is, if that is possible.
        """
        pickled: list[Part] = []
        if is_callers:
            # Whatever a user's exception has in it or does when it is pickled.
            with contextlib.suppress(Exception):
                # Its buffers as bytes, since the account itself is pickled.
                pickled = [bytes(part) for part in pack(error)]
        return cls(
            host=host,
            doing=doing,
            summary="".join(traceback.format_exception_only(error)).strip(),
            text="".join(traceback.format_exception(error)),
            pickled=pickled,
            # A lane's failure is another class, with that as its cause.
            is_consequence=any(isinstance(one, RankGoneError) for one in chain(error)),
            is_callers=is_callers,
        )

    def error(self, rank: int) -> BaseException:
        """The exception to raise in the caller, with the remote traceback as its cause."""
        raised = _loaded(self.pickled)
        if raised is None:
            why = ""
            if self.is_callers:
                why = " (an exception that cannot be pickled, or whose class is not known here)"
            raised = HorovodInternalError(
                f"rank {rank} on host {self.host} {self.doing}: {self.summary}{why}"
            )
        raised.__cause__ = RemoteTraceback(rank, self.host, self.text)
        return raised


def _loaded(pickled: Sequence[Part]) -> BaseException | None:
    if not pickled:
        return None
    # The class may be unknown here, or may not be made of its arguments.
    with contextlib.suppress(Exception):
        loaded = unpack(pickled)
        if isinstance(loaded, BaseException):
            return loaded
    return None
