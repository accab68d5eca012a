"""What each rank of `hvdlite.run` runs: it asks for the function, calls it, sends the result.

::

    python -c "... from hvdlite.launch.worker import main; main()" ADDRESS
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from hvdlite import timeline
from hvdlite.launch import wire
from hvdlite.launch.account import Account
from hvdlite.launch.parcel import Part, pack, unpack
from hvdlite.launch.rank import rank_here

_SECONDS_TO_SEE = 20.0
# From the worker's arguments, a program: hvdlite is where the caller found it, and the main module
# is empty, so that nothing runs twice where a function starts processes of its own.
PROGRAM = "import sys; sys.path.insert(0, {!r}); from hvdlite.launch.worker import main; main()"


class Task(NamedTuple):
    """What the caller wants of every rank, besides the function itself.

    Attributes:
        path: the caller's ``sys.path``.
        argv: the caller's ``sys.argv``.
        numbered: whether the function gets the rank as its first argument, and brings no result.
    """

    path: list[str]
    argv: list[str]
    numbered: bool


def main() -> None:
    """Do the task; a result ends the process as the end of a script does."""
    rank = rank_here()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        connection = wire.Wire(sys.argv[1], rank, os.environ)
        connection.send(wire.ASK)
        task = Task(*pickle.loads(connection.receive()[1]))
        parts = connection.receive_parts()
    except wire.WireError as error:
        sys.exit(f"hvdlite: rank {rank}: {error}")
    del os.environ[wire.KEY]
    sys.path[:], sys.argv[:] = task.path, task.argv
    teller = _Teller(connection)
    with teller.telling("cannot load the function and its arguments", is_callers=False):
        function, args, kwargs = unpack(parts)
    if task.numbered:
        args = (rank, *args)
    result = _call(function, args, kwargs, teller)
    with teller.telling(f"cannot send what the function returned ({type(result)})", False):
        packed = pack(None if task.numbered else result)
    teller.tell(wire.RESULT, packed)


def _call(function: Callable[..., Any], args: Any, kwargs: Any, teller: _Teller) -> Any:
    with teller.telling("raised", is_callers=True):
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            teller.give_up(error, "left by sys.exit() instead of returning a result", False)


class _Teller:
    """Tells the caller how it went, and waits until the caller knows."""

    def __init__(self, connection: wire.Wire) -> None:
        self._connection = connection

    def tell(self, kind: bytes, parts: Sequence[Part]) -> None:
        """Send a result or an account."""
        try:
            self._connection.send_parts(kind, parts)
            # The others fail as soon as this rank is gone, and must not be heard before it.
            self._connection.receive(_SECONDS_TO_SEE)
        except wire.WireError as error:
            sys.stderr.write(f"hvdlite: {error}\n")
            _leave()

    @contextlib.contextmanager
    def telling(self, doing: str, is_callers: bool) -> Any:
        """End the job on an exception, of which the caller gets an account."""
        try:
            yield
        except BaseException as error:
            self.give_up(error, doing, is_callers)

    def give_up(self, error: BaseException, doing: str, is_callers: bool) -> NoReturn:
        """Send an account of an exception, and leave."""
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        account = Account.of(error, os.uname().nodename, doing, is_callers)
        self.tell(wire.ERROR, [pickle.dumps(tuple(account))])
        _leave()


def _leave() -> NoReturn:
    """End at once: to leave in good order takes all ranks, and the others wait for this one."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        timeline.stop()
    os._exit(1)
