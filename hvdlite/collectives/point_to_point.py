"""Point to point: one rank sends an array, and another one receives it into its own.

Messages go over MPI, past the lanes: two ranks alone take part, in the order of their calls. Each
message begins with a header, so that a receiver notices what it has not expected.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import Any

from hvdlite.base.arrays import address
from hvdlite.engine import Engine
from hvdlite.engine.stall import StallInspector
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.transport.transport import back_off
from hvdlite.world import mpi

_HEADER = struct.Struct("<q24s")  # the number of elements, and their dtype
# Counts have 32 bits in MPI 3.
_MAX_BYTES = 2**30
# How often a waiting rank checks whether others have died.
_CHECK_SECONDS = 0.05
# Transfers that MPI may still work on, and whose memory it uses.
_in_flight: set[Transfer] = set()


class Transfer:
    """A message on its way.

    Args:
        engine: Engine of the ranks.
        array: Contiguous array to send, which must not change until the transfer has ended; or for
            the message that comes, of its size and dtype.
        peer: The other rank, by its rank among the engine's; None: any may send.
        tag: A number that pairs the calls of both.
        is_sent: Whether this rank sends, or else receives.

    Attributes:
        finished: Whether it has ended, with an error perhaps.
        peer: The other rank; after the end also where any might send.

    Raises:
        RankGoneError: A rank to which this one would send has died.
    """

    def __init__(
        self, engine: Engine, array: Any, peer: int | None, tag: int, is_sent: bool = True
    ) -> None:
        if is_sent:
            engine.named.transport.check_alive()  # MPI would take a short message all the same
        MPI = self._mpi = mpi.load()  # noqa: N806
        header = bytearray(_HEADER.size)
        if is_sent:
            _HEADER.pack_into(header, 0, array.size, array.dtype.name.encode())
        self._engine, self._array, self._header = engine, array, header
        self.peer, self._tag, self._is_sent = peer, tag, is_sent
        self.finished = False
        self._lock = threading.Lock()
        for each in [*_in_flight]:
            each.done()
        start, end = address(array), array.nbytes
        parts = range(0, end, _MAX_BYTES)
        sizes = [len(header), *(min(_MAX_BYTES, end - part) for part in parts)]
        places = [MPI.Get_address(header), *(start + part for part in parts)]
        self._type = MPI.Datatype.Create_struct(sizes, places, [MPI.BYTE] * len(sizes)).Commit()
        call = engine.world.comm.Isend if is_sent else engine.world.comm.Irecv
        other = MPI.ANY_SOURCE if peer is None else peer
        self._request = call([MPI.BOTTOM, 1, self._type], other, tag)
        _in_flight.add(self)

    @property
    def title(self) -> str:
        """Return what it is, for messages."""
        ids, peer = self._engine.world.ids, self.peer
        other = "any rank" if peer is None else f"rank {ids[peer]}"
        way = f"send to {other}" if self._is_sent else f"receive from {other}"
        return f"{way} (tag {self._tag}, {self._array.size} elements of {self._array.dtype.name})"

    def done(self) -> bool:
        """Return whether it has ended, with an error perhaps; moves data on its way."""
        with self._lock:
            if not self.finished:
                self._test()
            return self.finished

    def wait(self, timeout: float = 0.0) -> None:
        """Wait for the end.

        Args:
            timeout: Seconds; 0: as HVDLITE_STALL_SHUTDOWN_TIME_SECONDS says.

        Raises:
            MismatchError: What has arrived is not what was expected.
            HorovodInternalError: A rank has died, or nothing came in time.
        """
        engine, start, checked = self._engine, time.monotonic(), 0.0
        absent = [] if self.peer is None else [engine.world.ids[self.peer]]
        stall = StallInspector(engine.settings, lambda: self.title, lambda: absent or None)
        while not self.done():
            elapsed = time.monotonic() - start
            stall.check(elapsed)
            if timeout and elapsed > timeout:
                raise HorovodInternalError(
                    f"rank {engine.world.id}: waited {elapsed:.1f} s in {self.title}; see what the "
                    "other rank does, or allow more time"
                )
            if elapsed - checked > _CHECK_SECONDS:
                checked = elapsed
                engine.named.transport.check_alive()
            back_off(elapsed)
        if self._error is not None:
            raise self._error

    _error: HorovodInternalError | None = None

    def _test(self) -> None:
        status = self._mpi.Status()
        try:
            if not self._request.Test(status):
                return
            if not self._is_sent:
                self.peer = status.Get_source()
                self._check()
        except self._mpi.Exception as error:
            self._error = self._failure(error)
            if self._request:  # a receive from any rank, which another one might still complete
                self._request.Cancel()
                self._request.Free()
        self.finished = True
        _in_flight.discard(self)
        self._type.Free()

    def _failure(self, error: Any) -> HorovodInternalError:
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return self._mismatch("more elements")
        try:
            self._engine.named.transport.check_alive()
        except HorovodInternalError as gone:
            return gone
        return HorovodInternalError(
            f"rank {self._engine.world.id}: {self.title} failed: {error}; has the other rank died? "
            "See its output, and start again from a checkpoint"
        )

    def _check(self) -> None:
        size, name = _HEADER.unpack(self._header)
        dtype = name.rstrip(b"\0").decode()
        if (size, dtype) != (self._array.size, self._array.dtype.name):
            self._error = self._mismatch(f"{size} elements of {dtype}")

    def _mismatch(self, found: str) -> MismatchError:
        return MismatchError(
            f"rank {self._engine.world.id}: {self.title} has got {found}; send and receive the "
            "same size and dtype"
        )
