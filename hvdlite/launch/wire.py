"""The connection between a rank of `hvdlite.run` and the process that called it.

A socket of this host, or TCP where ranks run on others. Both ends first prove that they know the
job's key, which travels in the environment, for what comes after that is unpickled. Then there are
frames: a kind, a length, and so many bytes. On TCP, where others may write to a connection after
that, each frame carries two tags, one after the header and one after the body (see `Seal`). The
socket of this host needs none: it lies in a folder that only this user can open.

The process around each rank loads this file by its path: it imports nothing of hvdlite.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence

KEY = "HVDLITE_LAUNCH_KEY"
"""The environment variable with the job's key, hexadecimal."""

PREFIX = "wire:"
"""What the address of such a connection begins with (and the path of a FIFO does not)."""

# The kinds of frames. From the process around a rank:
OUT, ERR, REPORT, LEFT = b"o", b"e", b"p", b"l"
# From a rank, which waits for SEEN before it ends:
ASK, RESULT, ERROR = b"a", b"r", b"x"
# To a rank:
TASK, FUNCTION, SEEN = b"t", b"f", b"s"
# Before a RESULT or a FUNCTION, which take several parts:
PART = b"+"

HEADER = struct.Struct("!cQ")
PROOF = 32
HELLO = struct.Struct(f"!{PROOF}s{PROOF}sI")  # a challenge, a proof, the rank

_SECONDS_TO_ANSWER = 30.0
_MOST_AT_ONCE = 1 << 20
_LONGEST_PATH = 107  # of a socket of this host; sockaddr_un has 108 bytes


class WireError(OSError):
    """The other end cannot be reached, has gone, or does not know the key."""


def proof(key: bytes, by: bytes, first: bytes, second: bytes, rank: int) -> bytes:
    """What only who knows the key can say about two challenges.

    Args:
        key: the job's.
        by: who says it, ``b"rank"`` or ``b"launcher"``.
        first: the launcher's challenge.
        second: the rank's challenge.
        rank: of the process that connects.
    """
    message = b"|".join((by, first, second, str(rank).encode()))
    return hmac.new(key, message, hashlib.sha256).digest()


class Seal:
    """The tags of what one end of one connection sends: HMAC-SHA256 of a counter and the data.

    The key comes from the job's and from both challenges, so that nothing can be forged, changed,
    left out, repeated, sent back, or taken from another connection.

    Args:
        key: the job's; empty: tags are empty, too.
        by: who sends, ``b"rank"`` or ``b"launcher"``.
        first: the launcher's challenge.
        second: the rank's challenge.

    Attributes:
        size: bytes of a tag.
    """

    def __init__(self, key: bytes, by: bytes, first: bytes, second: bytes) -> None:
        self.size = hashlib.sha256().digest_size if key else 0
        self._key = hmac.new(key, b"|".join((b"frames", by, first, second)), hashlib.sha256)
        self._count = 0

    def tag(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the tag of the next piece that is sent."""
        if not self.size:
            return b""
        tag = hmac.new(self._key.digest(), struct.pack("!Q", self._count), hashlib.sha256)
        tag.update(data)
        self._count += 1
        return tag.digest()

    def fits(self, data: bytes | bytearray, tag: bytes | bytearray) -> bool:
        """Tell whether the next piece that was received is what the other end has sent."""
        return hmac.compare_digest(self.tag(data), tag)


def seals(key: bytes, first: bytes, second: bytes, connection: socket.socket) -> tuple[Seal, Seal]:
    """Return the seals of a rank and of the launcher on a connection."""
    if connection.family == socket.AF_UNIX:
        key = b""
    return Seal(key, b"rank", first, second), Seal(key, b"launcher", first, second)


def tcp_address(hosts: list[str], port: int) -> str:
    """The address of a port, under all the names that this host may be known by."""
    return f"{PREFIX}{','.join(hosts)}@{port}"


class Wire:
    """A rank's end of the connection.

    Args:
        address: the launcher's.
        rank: of this process.
        environment: where the key is.

    Raises:
        WireError: the launcher cannot be reached, or does not know the key.
    """

    def __init__(self, address: str, rank: int, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket = _dial(address.removeprefix(PREFIX))
        try:
            with self._translated():
                self._greet(bytes.fromhex(environment.get(KEY, "")), rank)
                self._socket.settimeout(None)
        except WireError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def send(self, kind: bytes, body: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame; from any thread."""
        header = HEADER.pack(kind, len(body))
        with self._lock, self._translated():
            self._socket.sendall(header + self._mine.tag(header))
            self._socket.sendall(body)
            self._socket.sendall(self._mine.tag(body))

    def send_parts(self, kind: bytes, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send several buffers as one message."""
        for part in parts[:-1]:
            self.send(PART, part)
        self.send(kind, parts[-1])

    def receive_parts(self) -> list[bytearray]:
        """Wait for a message of several buffers."""
        parts = []
        while True:
            kind, part = self.receive()
            parts.append(part)
            if kind != PART:
                return parts

    def receive(self, timeout: float | None = None) -> tuple[bytes, bytearray]:
        """Wait for a frame, so many seconds (None: as long as it takes)."""
        with self._translated():
            self._socket.settimeout(timeout)
            kind, length = HEADER.unpack(self._read_sealed(HEADER.size))
            return kind, self._read_sealed(length)

    def _greet(self, key: bytes, rank: int) -> None:
        first, second = bytes(self._read(PROOF)), secrets.token_bytes(PROOF)
        mine = proof(key, b"rank", first, second, rank)
        self._socket.sendall(HELLO.pack(second, mine, rank))
        theirs = bytes(self._read(PROOF))
        if not hmac.compare_digest(theirs, proof(key, b"launcher", first, second, rank)):
            raise WireError("the launcher does not know the job's key")
        self._mine, self._theirs = seals(key, first, second, self._socket)

    def _read_sealed(self, length: int) -> bytearray:
        received = self._read(length)
        if not self._theirs.fits(received, self._read(self._theirs.size)):
            self.close()
            raise WireError(
                "what came from the launcher was not sent by it: somebody else writes to the "
                "connection, or something on the way changes what passes"
            )
        return received

    def _read(self, length: int) -> bytearray:
        received = bytearray(length)
        view, done = memoryview(received), 0
        while done < length:
            count = self._socket.recv_into(view[done : done + _MOST_AT_ONCE])
            if not count:
                raise WireError("the launcher has closed the connection")
            done += count
        return received

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except WireError:
            raise
        except OSError as error:
            raise WireError(f"the connection to the launcher has failed: {error}") from None


@contextlib.contextmanager
def short(path: str) -> Iterator[str]:
    """A name of the same file that the address of a socket has room for."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _dial(address: str) -> socket.socket:
    if os.sep in address:
        dialed = socket.socket(socket.AF_UNIX)
        try:
            with short(address) as path:
                # Without a limit, or it fails where many ranks connect at once, instead of waiting.
                dialed.connect(path)
            dialed.settimeout(_SECONDS_TO_ANSWER)
        except OSError as error:
            dialed.close()
            raise WireError(f"found no launcher at {address}: {error}") from None
        return dialed
    hosts, _, port = address.rpartition("@")
    reasons = []
    for host in hosts.split(","):
        try:
            return socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER)
        except OSError as error:
            reasons.append(f"{host}: {error}")
    raise WireError(
        f"host {socket.gethostname()} cannot reach the launcher on port {port} "
        f"({'; '.join(reasons)}); allow connections between the hosts"
    )
