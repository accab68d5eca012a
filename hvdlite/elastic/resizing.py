"""This rank's connection to hvdliterun, through which a job goes on with another number of ranks.

hvdliterun knows when hosts come or go, and tells the ranks. They stop at their next commit, where
rank 0 hands over the state; hvdliterun starts the job again with as many ranks as there are slots
for, and `hvdlite.elastic.run` takes the state from it (`hvdlite.launch.discovery`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from hvdlite import collectives
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import protocol
from hvdlite.world import world

if TYPE_CHECKING:
    from hvdlite.elastic.state import State

_SECONDS_TO_ANSWER = 300.0


class Launcher:
    """The connection to hvdliterun."""

    def __init__(self, address: str) -> None:
        self._stops = False
        self.channel = protocol.connect(address, protocol.rank_here(), os.environ)
        self.channel.send(protocol.WATCH)

    def ask(self, kind: bytes, *parts: bytes) -> bytes:
        """Send a message, and return the answer."""
        answer = None
        try:
            self.channel.send(kind, *parts)
            while answer is None:
                answer = self._receive()
        except OSError as error:
            raise HorovodInternalError(
                f"rank {world.rank()}: the connection to hvdliterun has failed ({error!r}), which "
                "keeps the state while the number of ranks changes; see what ended it"
            ) from error
        return b"".join(answer)

    def wants_stop(self) -> bool:
        """Return whether this rank has been asked to stop at its next commit."""
        with suppress(OSError):  # of a launcher that has ended
            while not self._stops and self.channel.peek() is not None:
                self._receive()
        return self._stops

    def _receive(self) -> Sequence[bytearray] | None:
        """Return the next answer; None: it is the request to stop."""
        kind, parts = self.channel.receive(_SECONDS_TO_ANSWER)
        self._stops |= kind == protocol.STOP
        return None if kind == protocol.STOP else parts


_launcher: Launcher | None = None
_ended = False


def connect() -> Launcher | None:
    """Return the connection to hvdliterun; None: the number of ranks does not change.

    Raises:
        OSError: it cannot be reached.
    """
    global _launcher
    address = os.environ.get(protocol.ADDRESS)
    if address and _launcher is None and not _ended:
        _launcher = Launcher(address)
    return _launcher


def disconnect() -> None:
    """Keep the number of ranks from now on.

    A script that starts again would repeat the training that has come to its end here.
    """
    global _launcher, _ended
    _ended = True
    if _launcher is not None:
        _launcher.channel.close()
        _launcher = None


def wants_stop() -> bool:
    """Return whether hvdliterun wants another number of ranks."""
    return _launcher is not None and _launcher.wants_stop()


def resume(state: State) -> int | None:
    """Go on from the state of the previous run, and return its resets; None: it is the first run.

    It is collective.
    """
    launcher = connect()
    if launcher is None:
        return None
    kept = launcher.ask(protocol.ASK) if world.rank() == 0 else b""
    found = collectives.broadcast_object(pickle.loads(kept) if kept else None, 0, "elastic.state")
    if found is None:
        return None
    # If this run fails before, the next one gets that state. All say so, in case that one dies.
    collectives.barrier(name="elastic.resumed")
    launcher.ask(protocol.KEEP)
    resets, dump = found
    state.load(dump)
    return int(resets)


def hand_over(state: State, resets: int) -> None:
    """Hand the state to hvdliterun, for a job with another number of ranks; collective."""
    launcher = connect()
    assert launcher is not None
    state.gather()
    while True:
        before = world.current().ids
        if world.rank() == 0:
            kept = resets, state.dump()
            try:
                pickled = pickle.dumps(kept, protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # Whatever the objects in it do when they are pickled.
                raise HorovodInternalError(
                    f"rank {world.rank()}: the state cannot be pickled, which it has to be where "
                    f"hosts come and go ({type(error).__name__}: {error}); take out what cannot "
                    "travel"
                ) from error
            launcher.ask(protocol.KEEP, pickled)
        collectives.barrier(name="elastic.resize")
        if before == world.current().ids:  # else the rank that did it may have died
            return
