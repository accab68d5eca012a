"""The caller's end of the connections to the ranks of `hvdlite.run`.

It takes the place of the FIFO of ``hvdliterun``: besides reports of failures it carries the
function, the results and what the ranks print. All of it is read in the thread that waits for the
job, so that output appears where that thread's does (in a notebook: under its cell).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

from hvdlite.launch import wire
from hvdlite.launch.job import folder_of_a_job
from hvdlite.launch.parcel import Part
from hvdlite.launch.rank import END_JOB

_MOST_AT_ONCE = 1 << 20
# Seconds for what is still on its way when the job has ended.
_LAST_WORDS = 2.0
_REMEMBERED_LINES = 20
# Connections that have not proved yet that they know the key: how many, and for how many seconds
# each, when there are fewer, and when nobody else could connect because of them.
_MOST_STRANGERS = 64
_SECONDS_TO_PROVE, _SECONDS_WHEN_FULL = 10.0, 1.0


class Trouble(NamedTuple):
    """A rank that will bring no result.

    Attributes:
        rank: which.
        text: how it ended, and what to do; empty where it sent an account.
        account: of the exception that its function raised, pickled; empty: there is none.
    """

    rank: int
    text: str
    account: bytes


class Post:
    """Listens to the ranks.

    Args:
        folder: a folder that only this user can open.
        names: the names or addresses of this host that ranks on other hosts can connect to; none:
            all ranks run here.
        task: what each rank gets when it asks, and
        function: the parts of the function and its arguments.

    Attributes:
        address: where the ranks connect to.
        key: what they show that they know.
        results: the parts of the results that came, by rank.
        troubles: the ranks that failed, in the order in which that was heard of.
        connected: the ranks that have connected so far.
        said: the last lines that mpirun itself has printed.
    """

    def __init__(
        self, folder: str, names: list[str], task: bytes, function: Sequence[Part]
    ) -> None:
        self.key = secrets.token_bytes(32)
        self.results: dict[int, list[bytearray]] = {}
        self.troubles: list[Trouble] = []
        self.connected: set[int] = set()
        self.said: list[str] = []
        self._task = task
        self._function = function
        self._reports: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._peers: set[_Peer] = set()
        # Those that have not proved that they know the key, and when they came.
        self._strangers: dict[_Peer, float] = {}
        if names:
            self._listener = socket.create_server(("", 0))
            self.address = wire.tcp_address(names, self._listener.getsockname()[1])
        else:
            path = os.path.join(folder, "ranks")
            self._listener = socket.socket(socket.AF_UNIX)
            with wire.short(path) as name:
                self._listener.bind(name)
            self._listener.listen(128)
            self.address = wire.PREFIX + path
        self._listener.setblocking(False)
        self._listens = False
        self._listen()
        self._out, self.stdout = self._pipe("stdout")
        self._err, self.stderr = self._pipe("stderr")

    def wait(self, seconds: float) -> list[str]:
        """Serve the ranks; return their reports of failures, or none after so many seconds."""
        ready = self._selector.select(seconds)
        self._drop_strangers({key.fileobj for key, _ in ready})
        for key, events in ready:
            key.data(events)
        self._listen()
        reports, self._reports = self._reports, []
        return reports

    def finish(self) -> list[str]:
        """The reports that are still on their way when all ranks have ended."""
        deadline = time.monotonic() + _LAST_WORDS
        reports = self.wait(0)
        while self._peers and time.monotonic() < deadline:
            reports += self.wait(0.05)
        return reports + self.wait(0)

    def close(self) -> None:
        """Close all connections."""
        for peer in list(self._peers):
            self._leave(peer)
        self._listener.close()
        for descriptor in (self._out, self.stdout, self._err, self.stderr):
            os.close(descriptor)
        self._selector.close()

    def take(self, peer: _Peer, kind: bytes, body: bytearray) -> None:
        """Do what a frame from a rank asks for."""
        rank = peer.rank
        if kind in (wire.OUT, wire.ERR):
            _show("stdout" if kind == wire.OUT else "stderr", body, f"[{rank}] ")
        elif kind == wire.ASK:
            peer.send(wire.TASK, self._task)
            for part in self._function[:-1]:
                peer.send(wire.PART, part)
            peer.send(wire.FUNCTION, self._function[-1])
        elif kind == wire.PART:
            peer.parts.append(body)
        elif kind == wire.RESULT:
            self.results[rank], peer.parts = [*peer.parts, body], []
            peer.send(wire.SEEN)
        elif kind == wire.ERROR:
            self.troubles.append(Trouble(rank, "", bytes(body)))
            peer.send(wire.SEEN)
        elif kind == wire.REPORT:
            self._report(rank, body.decode())
        elif kind == wire.LEFT and not self._is_known(rank):
            text = f"rank {rank} ended without a result (os._exit() or the like)"
            self.troubles.append(Trouble(rank, f"{text}; let the function return instead", b""))
            self._reports += [f"1 {text}", END_JOB]

    def _report(self, rank: int, line: str) -> None:
        code, _, text = line.partition(" ")
        when = "after" if rank in self.results else "before"
        text += f" {when} its function had returned; what it printed last may say why"
        if code.isdigit() and rank not in {trouble.rank for trouble in self.troubles}:
            self.troubles.append(Trouble(rank, text, b""))
        self._reports.append(line)

    def _is_known(self, rank: int) -> bool:
        return rank in self.results or rank in {trouble.rank for trouble in self.troubles}

    def _pipe(self, stream: str) -> tuple[int, int]:
        """A pipe for what mpirun itself prints, in the place of a descriptor of ours."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        unfinished = b""

        def read(events: int) -> None:
            nonlocal unfinished
            with contextlib.suppress(BlockingIOError):
                received = unfinished + os.read(reader, _MOST_AT_ONCE)
                lines, end, unfinished = received.rpartition(b"\n")
                if end:
                    self.said += lines.decode(errors="replace").splitlines()
                    del self.said[:-_REMEMBERED_LINES]
                    _show(stream, lines, "")

        self._selector.register(reader, selectors.EVENT_READ, read)
        return reader, writer

    def _listen(self) -> None:
        """Look after new connections, unless there are too many that nobody knows."""
        wanted = len(self._strangers) < _MOST_STRANGERS
        if wanted and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listens and not wanted:
            self._selector.unregister(self._listener)
        self._listens = wanted

    def _drop_strangers(self, ready: Collection[object]) -> None:
        """Close the connections that have had their time, but none from which there is news."""
        full = len(self._strangers) >= _MOST_STRANGERS
        latest = time.monotonic() - (_SECONDS_WHEN_FULL if full else _SECONDS_TO_PROVE)
        for peer, since in list(self._strangers.items()):
            if since < latest and peer.socket not in ready:
                self._leave(peer)

    def _accept(self, events: int) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._strangers:
                raise
            self._leave(next(iter(self._strangers)))
            return
        peer = _Peer(accepted, self)
        self._peers.add(peer)
        self._strangers[peer] = time.monotonic()
        self._selector.register(accepted, peer.interest, self._serve(peer))

    def _serve(self, peer: _Peer) -> Callable[[int], None]:
        def serve(events: int) -> None:
            if peer not in self._peers:
                return  # Dropped in the same turn.
            try:
                peer.serve(events)
            except (OSError, EOFError):
                # Who dies is reported by the process around it, or by mpirun.
                self._leave(peer)
            else:
                if peer.rank >= 0:
                    self.connected.add(peer.rank)
                    self._strangers.pop(peer, None)
                self._update(peer)

        return serve

    def _update(self, peer: _Peer) -> None:
        key = self._selector.get_key(peer.socket)
        if key.events != peer.interest:
            self._selector.modify(peer.socket, peer.interest, key.data)

    def _leave(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.socket)
        peer.socket.close()


class _Peer:
    """One connection, which never blocks.

    Attributes:
        rank: who is at its other end; -1: not known yet.
        parts: of the message that is arriving.
    """

    def __init__(self, accepted: socket.socket, post: Post) -> None:
        self.socket = accepted
        self.socket.setblocking(False)
        self.rank = -1
        self.parts: list[bytearray] = []
        self._post = post
        self._unsent: list[memoryview] = []
        self._challenge = secrets.token_bytes(wire.PROOF)
        self._put(self._challenge)
        self._parts = self._conversation()
        self._expect(next(self._parts))

    @property
    def interest(self) -> int:
        """The events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, kind: bytes, body: Part = b"") -> None:
        """Send a frame, as soon as the other end takes it."""
        for piece in (wire.HEADER.pack(kind, len(body)), body):
            self._put(piece)
            self._put(self._mine.tag(piece))

    def serve(self, events: int) -> None:
        """Read and write what can be."""
        if events & selectors.EVENT_READ:
            self._read()
        self._flush()

    def _read(self) -> None:
        count = self.socket.recv_into(self._view[self._received :][:_MOST_AT_ONCE])
        if not count:
            raise EOFError
        self._received += count
        while self._received == len(self._view):
            self._expect(self._parts.send(self._buffer))

    def _expect(self, length: int) -> None:
        self._buffer = bytearray(length)
        self._view = memoryview(self._buffer)
        self._received = 0

    def _conversation(self) -> Generator[int, bytearray, None]:
        """Say how many bytes to read, get them, and so on."""
        second, shown, rank = wire.HELLO.unpack((yield wire.HELLO.size))
        key = self._post.key
        expected = wire.proof(key, b"rank", self._challenge, second, rank)
        if not hmac.compare_digest(shown, expected):
            raise EOFError
        self.rank = rank
        self._put(wire.proof(key, b"launcher", self._challenge, second, rank))
        theirs, self._mine = wire.seals(key, self._challenge, second, self.socket)
        while True:
            header = yield wire.HEADER.size
            self._check(theirs.fits(header, (yield theirs.size)))
            kind, length = wire.HEADER.unpack(header)
            body = yield length
            self._check(theirs.fits(body, (yield theirs.size)))
            self._post.take(self, kind, body)

    def _check(self, is_genuine: bool) -> None:
        if not is_genuine:
            text = (
                f"what came from rank {self.rank} was not sent by it: somebody else writes to the "
                "connection, or something on the way changes what passes"
            )
            self._post.troubles.append(Trouble(self.rank, text, b""))
            raise EOFError

    def _put(self, data: Part) -> None:
        if len(data):
            self._unsent.append(memoryview(data))

    def _flush(self) -> None:
        while self._unsent:
            try:
                count = self.socket.send(self._unsent[0][:_MOST_AT_ONCE])
            except BlockingIOError:
                return
            self._unsent[0] = self._unsent[0][count:]
            if not self._unsent[0]:
                del self._unsent[0]


@contextlib.contextmanager
def post(names: Iterable[str], task: bytes, function: Sequence[Part]) -> Iterator[Post]:
    """The post of one job."""
    with folder_of_a_job("hvdlite-") as folder:
        opened = Post(folder, list(names), task, function)
        try:
            yield opened
        finally:
            opened.close()


def _show(stream: str, lines: bytes | bytearray, prefix: str) -> None:
    """Print lines, each with its prefix, where the caller's own output goes now."""
    text = lines.decode(errors="replace")
    shown = "".join(f"{prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))
    file: TextIO = getattr(sys, stream)
    file.write(shown)
    file.flush()
