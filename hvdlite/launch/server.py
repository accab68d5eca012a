"""The launcher's end of the connections to the ranks.

It receives reports of failures from the processes around the ranks and, for `hvdlite.run`, sends
the function and receives the results and everything that the ranks print. A thread serves each
connection. All that concerns the user happens in the thread that waits for the job, so that output
appears where that thread's does (in a notebook: under its cell).
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from hvdlite.errors import ranks_text
from hvdlite.launch import folders
from hvdlite.launch.rank import SHARED
from hvdlite.observe import protocol
from hvdlite.observe.protocol import Channel, ForgedError, Part
from hvdlite.observe.status import FILE

_TICK = 0.05
# Messages that wait for the calling thread; the ranks wait when there are more.
_MAX_WAITING = 64
# Seconds for what is still on its way when the job has ended.
_LAST_SECONDS = 2.0
_REMEMBERED_LINES = 20
# Connections that have not proved yet that they know the key: how many there may be, and for how
# many seconds each.
_MAX_STRANGERS, _SECONDS_TO_PROVE = 64, 10.0
_MPIRUN = -1  # in the place of a rank
_CLEAR = "\r\x1b[K"  # to the beginning of the line, and clear it

_Message = tuple[int, bytes, list[bytearray]]  # from a rank, of a kind, with parts


class Failure(NamedTuple):
    """A rank that failed, with its exit code (128 + n for signal n).

    The text says which rank, where and how, or else the error is its exception, pickled.
    """

    rank: int
    code: int
    text: str
    error: bytes = b""


class Server:
    """Serves the ranks of one job, as a context manager, which closes all connections.

    Args:
        addresses: where this host listens for ranks on others; empty: on all of its interfaces;
            None: only processes of this host connect.
        task: what a rank of `hvdlite.run` gets when it asks; it is the state then.
        spares: the number of processes that wait beside them.

    Attributes:
        folder: the job's, which only this user can open.
        key: what they must know; empty where only this user can connect.
        failures: the first failure of each rank, by rank, in the order of their arrival.
        exited: the first rank whose process ended with an error.
        deaths: the ranks without which the others go on, in the order of their deaths.
        left: the ranks whose process ended well.
        unmet: those of them that had not met the others by then.
        wants_end: whether a rank has asked for the end of the job.
        hosts: the names of the host of each rank that has connected so far.
        watching: the connections of the ranks that stop when they are asked to.
        state: the parts of the state that only the launcher has: from the run before until all
            ranks have it, and for the next run as soon as rank 0 has handed it over.
        printed: the last lines that mpirun itself has printed.
    """

    def __init__(
        self,
        addresses: Sequence[str] | None = None,
        task: Sequence[Part] = (),
        ranks: int = 1,
        spares: int = 0,
    ) -> None:
        self.ranks, self.spares = ranks, spares
        self.results: dict[int, list[bytearray]] = {}
        self.failures: dict[int, Failure] = {}
        self.exited: Failure | None = None
        self.deaths: list[Failure] = []
        self.left: set[int] = set()
        self.unmet: set[int] = set()
        self.wants_end = False
        self.hosts: dict[int, list[str]] = {}
        self.watching: dict[int, Channel] = {}
        self.state = task
        self.printed: list[str] = []
        self.columns = 80
        self.key = b"" if addresses is None else secrets.token_bytes(32)
        self._addresses, self._is_call = addresses, bool(task)
        self._messages: queue.Queue[_Message | OSError] = queue.Queue(_MAX_WAITING)
        self._closed = False
        # The beginnings of lines, by rank and kind; the first of them is on the terminal.
        self._live: dict[tuple[int, bytes], str] = {}
        self._is_drawn = False
        self._readers: list[threading.Thread] = []
        # When each one came that has not proved yet that it knows the key, and the others.
        self._strangers: dict[socket.socket, float] = {}
        self._known: set[socket.socket] = set()

    def read(self, output: IO[bytes], kind: bytes) -> None:
        """Show what mpirun itself prints, like a rank's lines of a kind."""

        def read() -> None:
            with output:
                for line in output:
                    self._put((_MPIRUN, kind, [bytearray(line)]))

        self._readers.append(_start(read))

    def serve(self, seconds: float) -> None:
        """Take the messages that have come; wait for one at most so many seconds."""
        with contextlib.suppress(queue.Empty):
            self._take(self._messages.get(timeout=seconds))
            for _ in range(_MAX_WAITING):
                self._take(self._messages.get_nowait())

    def are_connected(self) -> bool:
        """Return whether all ranks and spares have called ``hvd.init()``, all on this host."""
        names = (f"rank.{rank}/{FILE}" for rank in range(self.ranks + self.spares))
        return all(os.path.exists(os.path.join(self.folder, name)) for name in names)

    def check_start(self, seconds: float = 1.0) -> None:
        """End the job if ranks wait so long in ``hvd.init()`` for one that has ended without it."""
        if not self.unmet or self.exited:
            return
        paths = (os.path.join(self.folder, f"rank.{n}", protocol.NOTES) for n in range(self.ranks))
        since = [protocol.notes(path)[protocol.JOINING] for path in paths]
        begun = time.monotonic_ns() - seconds * 1e9
        if waiting := [number for number, start in enumerate(since) if 0 < start < begun]:
            rank = min(self.unmet)
            text = (
                f"rank {rank} ended with exit code 0 without hvd.init(), in which "
                f"{ranks_text(waiting)} waited for it; call it on all ranks, first of all"
            )
            self._note_exit(Failure(rank, 1, text))
            self.wants_end = True

    def ask_to_stop(self) -> None:
        """Have all ranks stop at their next commit, so that another number of them can go on."""
        for channel in list(self.watching.values()):
            with contextlib.suppress(OSError):  # that rank has ended
                channel.send(protocol.STOP)

    def finish(self) -> None:
        """Take the messages that are still on their way when all ranks have ended."""
        deadline = time.monotonic() + _LAST_SECONDS
        while (
            self._known or any(reader.is_alive() for reader in self._readers)
        ) and time.monotonic() < deadline:
            self.serve(_TICK)
        self.serve(0)
        self._live.clear()  # of a rank that was killed together with the process around it
        self.clear()

    def __enter__(self) -> Server:
        with contextlib.ExitStack() as resources:
            folder = folders.temporary(tempfile.gettempdir(), SHARED)
            self.folder = resources.enter_context(folder)
            if self._addresses is not None:
                self._listeners = _listen(self._addresses or [""])
                names = [*self._addresses, socket.getfqdn(), socket.gethostname()]
                port = self._listeners[0].getsockname()[1]
                self.address = f"{','.join(dict.fromkeys(names))}@{port}"
            else:
                self.address = os.path.join(self.folder, "ranks")
                with protocol.short(self.address) as name:
                    self._listeners = [socket.create_server(name, family=socket.AF_UNIX)]
            self._resources = resources.pop_all()
        for listener in self._listeners:
            listener.settimeout(_TICK)
            _start(self._accept, listener)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for connection in [*self._listeners, *self._strangers, *self._known]:
            _shut_down(connection)
        self._resources.close()

    def _take(self, message: _Message | OSError) -> None:
        """Do what a message asks for, in the calling thread."""
        if isinstance(message, OSError):
            raise message
        rank, kind, parts = message
        if kind in (protocol.OUT, protocol.ERR):
            self._show(kind, rank, parts[0])
        elif kind == protocol.LIVE and not self._is_call:
            self._live[rank, bytes(parts[0])] = parts[1].decode(errors="replace").strip("\r")
            self._redraw()
        elif kind == protocol.RESULT:
            self.results[rank] = parts
        elif kind == protocol.ERROR:
            self.failures.setdefault(rank, Failure(rank, 1, "", bytes(parts[0])))
        elif kind == protocol.REPORT:
            code, text = (part.decode() for part in parts)
            if self._is_call:
                when = "after" if rank in self.results else "before"
                text += f" {when} its function had returned; what it printed last may say why"
            self._note_exit(Failure(rank, int(code), text))
        elif kind == protocol.DEATH:
            code, text = (part.decode() for part in parts)
            self.deaths.append(Failure(rank, int(code), text))
        elif kind == protocol.KEEP:
            self.state = [part for part in parts if part]
        elif kind == protocol.END_JOB:
            self.wants_end = True
        elif kind == protocol.LEFT:
            self.left.add(rank)
            self.unmet |= set() if any(parts) else {rank}
            if self._is_call and not {rank} & {*self.results, *self.failures}:
                text = f"rank {rank} ended without a result (os._exit() or the like)"
                self._note_exit(Failure(rank, 1, f"{text}; let the function return instead"))
                self.wants_end = True

    def _note_exit(self, failure: Failure) -> None:
        self.failures.setdefault(failure.rank, failure)
        self.exited = self.exited or failure

    def _show(self, kind: bytes, rank: int, received: bytearray) -> None:
        """Print lines, each with its rank, where the caller's own output goes now."""
        lines = received.decode(errors="replace").removesuffix("\n").split("\n")
        if rank == _MPIRUN:
            self.printed = (self.printed + lines)[-_REMEMBERED_LINES:]
        prefix = f"[{rank}] " if self._is_call and rank != _MPIRUN else ""
        self._live.pop((rank, kind), None)
        self.clear()
        file = sys.stdout if kind == protocol.OUT else sys.stderr
        print("".join(f"{prefix}{line}\n" for line in lines), end="", file=file, flush=True)
        self._redraw()

    def clear(self) -> None:
        """Remove the line that goes on from the terminal, where another one is to be printed."""
        if self._is_drawn:
            self._is_drawn = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def _redraw(self) -> None:
        """Draw the line that goes on; of several ranks' the first one's."""
        self._is_drawn = bool(self._live)
        if self._live:
            text = self._live[min(self._live)].rpartition("\r")[2]
            print(_CLEAR + text[: self.columns - 1], end="", file=sys.stderr, flush=True)

    def _put(self, message: _Message | OSError) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self._messages.put(message, timeout=_TICK)
                return

    def _accept(self, listener: socket.socket) -> None:
        """Start a thread for each connection, unless too many have not proved anything yet."""
        with listener:
            while not self._closed:
                for stranger, since in list(self._strangers.items()):
                    if time.monotonic() > since + _SECONDS_TO_PROVE:
                        _shut_down(stranger)
                strangers = len(self._strangers)
                if strangers >= _MAX_STRANGERS:
                    time.sleep(_TICK)
                    continue
                try:
                    accepted, _ = listener.accept()
                except (TimeoutError, ConnectionError):
                    continue
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE) and strangers:
                        time.sleep(_TICK)  # until they have been dropped
                        continue
                    self._put(error)
                    return
                self._strangers[accepted] = time.monotonic()
                _start(self._serve_connection, accepted)

    def _serve_connection(self, connection: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel = Channel(connection, self.key, is_launchers=True)
            number, *names = channel.receive()[1][0].decode().split()
            rank = channel.rank = int(number)
            self.hosts[rank] = names
            self._known.add(connection)
            del self._strangers[connection]
            channel.send(protocol.HELLO)
            while True:
                kind, parts = channel.receive()
                if kind == protocol.ASK:
                    channel.send(protocol.TASK, *self.state)
                elif kind == protocol.WATCH:
                    self.watching[rank] = channel
                else:
                    self._put((rank, kind, parts))
                    if kind in protocol.ACKNOWLEDGED:
                        channel.send(protocol.SEEN)
        except ForgedError as error:
            if channel and channel.rank >= 0:
                self.failures.setdefault(channel.rank, Failure(channel.rank, 1, str(error)))
        except (OSError, ValueError, OverflowError, MemoryError):
            # A rank that dies is reported by the process around it, or by mpirun. The other errors
            # are those of a stranger's bytes.
            pass
        finally:
            connection.close()
            self._strangers.pop(connection, None)
            self._known.discard(connection)


def _listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Return sockets that listen at one port of several addresses."""
    while True:
        listeners: list[socket.socket] = []
        port = 0
        try:
            for address in addresses:
                listeners.append(socket.create_server((address, port)))
                port = listeners[0].getsockname()[1]
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if not listeners or error.errno != errno.EADDRINUSE:
                raise


def _start(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="hvdlite launch", daemon=True)
    thread.start()
    return thread


def _shut_down(connection: socket.socket) -> None:
    """End a connection whose thread waits for it, and closes it then."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
