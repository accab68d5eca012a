"""The program that each rank of `hvdlite.run` runs: it gets the function and sends the result.

Functions, results and exceptions travel as `pack` and `RemoteError` have them.

::

    python -c "... from hvdlite.launch.worker import main; main()" ADDRESS
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.observe import protocol, timeline
from hvdlite.observe.failures import chain
from hvdlite.observe.protocol import Channel, Part

_SECONDS_TO_SEE = 20.0
# A format of the program with the folder of the package: hvdlite is where the caller found it, and
# the main module is empty, so that nothing runs twice where a function starts processes itself.
PROGRAM = "import sys; sys.path.insert(0, {!r}); from hvdlite.launch.worker import main; main()"


def main() -> None:
    """Call the function; a result ends the process as the end of a script does."""
    rank = protocol.rank_here()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        channel = protocol.connect(sys.argv[1], rank, os.environ)
        channel.send(protocol.ASK)
        pickled, *function_parts = channel.receive()[1]
    except OSError as error:
        sys.exit(f"hvdlite: rank {rank}: {error}")
    os.environ.pop(protocol.KEY, None)
    sys.path[:], sys.argv[:] = pickle.loads(pickled)
    with _reporting(channel, "cannot load the function and its arguments"):
        function, args, kwargs = unpack(function_parts)
    with _reporting(channel, "raised", is_callers=True):
        result = function(*args, **kwargs)
    with _reporting(channel, f"cannot send what the function returned ({type(result)})"):
        packed = pack(result)
    _send(channel, protocol.RESULT, *packed)
    channel.close()


def numbered(function: Callable[..., Any], *args: Any) -> None:
    """Call a function with this process's rank before its arguments."""
    function(protocol.rank_here(), *args)


@contextlib.contextmanager
def _reporting(channel: Channel, doing: str, is_callers: bool = False) -> Iterator[None]:
    """End the job on an exception, and send it to the caller; as it is, where it `is_callers`."""
    try:
        yield
    except BaseException as error:
        if is_callers and isinstance(error, SystemExit):
            doing, is_callers = "left by sys.exit() instead of returning a result", False
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sent = RemoteError.of(error, doing, is_callers)
        _send(channel, protocol.ERROR, pickle.dumps(tuple(sent)))
        _leave()


def _send(channel: Channel, kind: bytes, *parts: Part) -> None:
    """Send a result or an exception, and wait until the caller has it."""
    try:
        channel.send(kind, *parts)
        # The others fail as soon as this rank is gone, and must not be heard before it.
        channel.receive(_SECONDS_TO_SEE)
    except OSError as error:
        sys.stderr.write(f"hvdlite: the connection to the launcher has failed: {error}\n")
        _leave()


def _leave() -> NoReturn:
    """End at once: to leave in good order takes all ranks, and the others wait for this one."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        timeline.stop()
    os._exit(1)


def pack(obj: Any) -> list[Part]:
    """Pickle an object, by value where it cannot be imported elsewhere.

    Returns:
        The buffers of its arrays, which are the arrays' own memory, and last the pickle.
    """
    import cloudpickle  # type: ignore[import-untyped]

    if main := sys.modules.get("__mp_main__"):  # of a process that multiprocessing has spawned
        cloudpickle.register_pickle_by_value(main)
    buffers: list[pickle.PickleBuffer] = []
    pickled: bytes = cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return [*(buffer.raw() for buffer in buffers), pickled]


def unpack(parts: Sequence[Part]) -> Any:
    """Return the object; its arrays use the memory of the parts."""
    *buffers, pickled = parts
    return pickle.loads(pickled, buffers=buffers)


class RemoteTraceback(Exception):  # noqa: N818 - not an error, but where one comes from
    """The cause of an exception that came from a rank; its text is the traceback there."""

    def __init__(self, rank: int, host: str, text: str) -> None:
        super().__init__(f"on rank {rank} (host {host}):\n{text}")
        self.rank = rank
        self.host = host


class RemoteError(NamedTuple):
    """An exception that ended a rank, as the rank sends it.

    Attributes:
        host: where it ran.
        what: what it did, as in "cannot load the function", and the exception in one line.
        text: the traceback.
        pickled: the exception, which is to be raised in the caller; empty where it cannot be
            pickled; None: it is not to be raised there.
        is_consequence: whether it only says that another rank has gone.
    """

    host: str
    what: str
    text: str
    pickled: Sequence[Part] | None
    is_consequence: bool

    @classmethod
    def of(cls, error: BaseException, doing: str, is_callers: bool) -> RemoteError:
        """Describe an exception of this rank, which is raised in the caller if it `is_callers`."""
        pickled: list[Part] | None = [] if is_callers else None
        if is_callers:
            # A user's exception may hold anything and do anything when it is pickled.
            with contextlib.suppress(Exception):
                # Its buffers as bytes, since this description is pickled itself.
                pickled = [bytes(part) for part in pack(error)]
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(
            host=os.uname().nodename,
            what=f"{doing}: {summary}",
            text="".join(traceback.format_exception(error)),
            pickled=pickled,
            # A lane's failure is another class, with that as its cause.
            is_consequence=any(isinstance(one, RankGoneError) for one in chain(error)),
        )

    def error(self, rank: int) -> BaseException:
        """Return the exception to raise in the caller, with the remote traceback as its cause."""
        unpacked: Any = None
        # The class may be unknown here, or may not be made of its arguments.
        with contextlib.suppress(Exception):
            unpacked = unpack(self.pickled or ())
        why = ""
        if self.pickled is not None:
            why = " (an exception that cannot be pickled, or whose class is not known here)"
        described = HorovodInternalError(f"rank {rank} on host {self.host} {self.what}{why}")
        error: BaseException = unpacked if isinstance(unpacked, BaseException) else described
        error.__cause__ = RemoteTraceback(rank, self.host, self.text)
        return error
