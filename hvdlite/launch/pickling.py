"""Functions, results and exceptions in the form in which they travel between processes."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.observe.failures import chain
from hvdlite.observe.protocol import Part


def pack(obj: Any) -> list[Part]:
    """Pickle an object, by value where it cannot be imported elsewhere.

    Returns:
        The buffers of its arrays, which are the arrays' own memory, and last the pickle.
    """
    import cloudpickle  # type: ignore[import-untyped]

    buffers: list[pickle.PickleBuffer] = []
    pickled: bytes = cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return [*(buffer.raw() for buffer in buffers), pickled]


def unpack(parts: Sequence[Part]) -> Any:
    """Return the object; its arrays use the memory of the parts."""
    *buffers, pickled = parts
    return pickle.loads(pickled, buffers=buffers)


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


class RemoteError(NamedTuple):
    """An exception that ended a rank, as the rank sends it.

    Attributes:
        host: where it ran.
        doing: what it did, as in "cannot load the function".
        summary: the exception in one line.
        text: the traceback.
        pickled: the exception; empty where it cannot be pickled.
        is_consequence: whether it only says that another rank has gone.
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
    def of(cls, error: BaseException, host: str, doing: str, is_callers: bool) -> RemoteError:
        """Describe an exception that was caught on this rank; for the arguments see above."""
        pickled: list[Part] = []
        if is_callers:
            # A user's exception may hold anything and do anything when it is pickled.
            with contextlib.suppress(Exception):
                # Its buffers as bytes, since this description is pickled itself.
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
        """Return the exception to raise in the caller, with the remote traceback as its cause."""
        raised: BaseException | None = None
        # The class may be unknown here, or may not be made of its arguments.
        with contextlib.suppress(Exception):
            unpacked = unpack(self.pickled)
            raised = unpacked if isinstance(unpacked, BaseException) else None
        if raised is None:
            why = ""
            if self.is_callers:
                why = " (an exception that cannot be pickled, or whose class is not known here)"
            raised = HorovodInternalError(
                f"rank {rank} on host {self.host} {self.doing}: {self.summary}{why}"
            )
        raised.__cause__ = RemoteTraceback(rank, self.host, self.text)
        return raised
