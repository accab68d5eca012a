"""The messages between a rank, the process around it, and their launcher.

They share environment variables, a folder of the job on the launcher's host, and a connection.
There, a message is a kind and one or more parts. On this host the connection is a socket in a
folder that only this user can open. Ranks on other hosts connect by TCP, where strangers can
connect, too, and may write into a connection. There, each frame is followed by HMACs (see `Seal`),
and nothing that comes without them is used. The job's key travels in the environment.

`multiprocessing.connection` also has framing and authentication, but loses four properties: it
authenticates the beginning of a connection only, with HMAC-MD5 before Python 3.12; its handshake
has no time limit; and it transfers large arrays at half the speed, into memory that is read-only.

The process around each rank loads this file without the rest of hvdlite, of which it imports
nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence

# The names that process managers give to the rank.
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

FOLDER = "HVDLITE_LAUNCHER_FOLDER"
"""The environment variable with a folder for this rank alone, removed at the end of the job."""

NOTES = "HVDLITE_LAUNCHER_STEPS"
"""The environment variable with the file of a rank's notes, which outlives the rank; also the
file's name in that folder, if there is one."""
# What the notes are, each an int64, 0 at first: the number of the last step, 1 once the ranks have
# met, since when this one waits for others to start MPI, and since when it leaves (monotonic ns).
STEP, MET, JOINING, LEAVING = range(4)
NOTES_SIZE = 32

COLUMNS = "HVDLITE_TERMINAL_COLUMNS"
"""The environment variable with the columns of the launcher's terminal; 0: it has none."""

KEY = "HVDLITE_LAUNCH_KEY"
"""The environment variable with the job's key, hexadecimal; only where ranks connect by TCP."""

ADDRESS = "HVDLITE_LAUNCH_ADDRESS"
"""The environment variable with the launcher's address, where the number of ranks may change."""

# The kinds of messages. From the process around a rank, LIVE being a line that goes on:
LIVE, OUT, ERR, REPORT, END_JOB, LEFT, DEATH = b"v", b"o", b"e", b"p", b"j", b"l", b"d"
# From a rank: a request for what the launcher keeps for it, the function of `hvdlite.run` or the
# state of the previous run; how the function ended, after which the rank waits for SEEN.
ASK, RESULT, ERROR = b"a", b"r", b"x"
# To a rank; TASK has what it has asked for.
TASK, SEEN = b"t", b"s"
# From a rank of a job whose size may change: it stops when it is asked to; the state that the next
# run begins with, or nothing when all ranks have the previous one's.
WATCH, KEEP = b"w", b"k"
# To such a rank: it is to stop at the next commit.
STOP = b"z"
# The beginning of each connection, from both ends; a rank's has its number and its host's names:
HELLO = b"h"
# All parts of a message but the last:
_PART = b"+"
#: Kinds that the launcher answers by SEEN.
ACKNOWLEDGED = {REPORT, RESULT, ERROR, KEEP}

NONCE = 32
HEADER = struct.Struct("!cQ")

_SECONDS_TO_ANSWER = 30.0
_MAX_READ = 1 << 20
# Of the first message, from an end that may not be what it seems to be.
_MAX_FIRST = 1 << 16
_MAX_PATH = 107  # of a socket of this host; sockaddr_un has 108 bytes

Part = bytes | bytearray | memoryview


class ForgedError(ConnectionError):
    """The other end did not send what was received, or does not know the job's key."""


class Seal:
    """The HMACs of what one end of one connection sends.

    Each covers a counter and the data, under a key made from the job's key and from random numbers
    of both ends. Therefore nothing can be forged, changed, left out, repeated, sent back, or taken
    from another connection.

    Args:
        key: of the job; empty: HMACs are empty, too.
        sender: ``b"rank"`` or ``b"launcher"``.
        nonces: the launcher's random number and the rank's.

    Attributes:
        size: bytes of an HMAC.
    """

    def __init__(self, key: bytes, sender: bytes, nonces: bytes) -> None:
        self.size = 32 if key else 0
        self._key = hmac.digest(key, sender + nonces, "sha256") if key else b""
        self._count = 0

    def tag(self, data: Part) -> bytes:
        """Return the HMAC of the next piece that is sent or received."""
        if not self.size:
            return b""
        tag = hmac.new(self._key, struct.pack("!Q", self._count), "sha256")
        tag.update(data)
        self._count += 1
        return tag.digest()


class Channel:
    """One end of a connection.

    Args:
        connected: the socket, which the channel owns.
        key: the job's; empty: the socket is one of this host.
        is_launchers: whether a rank is at the other end, and not the launcher.

    Attributes:
        rank: which one; -1: not known yet.
    """

    def __init__(self, connected: socket.socket, key: bytes, is_launchers: bool) -> None:
        self.rank = -1
        self._socket = connected
        self._is_launchers = is_launchers
        self._lock = threading.Lock()
        self._is_first = True
        nonces = b""
        if key:
            # A message goes out in several pieces, which need not wait for each other.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine = os.urandom(NONCE)
            connected.sendall(mine)
            theirs = bytes(self._read(NONCE))
            nonces = mine + theirs if is_launchers else theirs + mine
        self._mine, self._theirs = Seal(key, b"launcher", nonces), Seal(key, b"rank", nonces)
        if not is_launchers:
            self._mine, self._theirs = self._theirs, self._mine

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def peek(self) -> bytes | None:
        """Return the next byte, without waiting: empty at the end, None if it has not come yet."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def send(self, kind: bytes, *parts: Part) -> None:
        """Send a message; from any thread."""
        *first, last = parts or (b"",)
        with self._lock:
            for part in first:
                self._send_frame(_PART, part)
            self._send_frame(kind, last)

    def receive(self, timeout: float | None = None) -> tuple[bytes, list[bytearray]]:
        """Wait for a message.

        Args:
            timeout: seconds without a byte; None: unlimited.

        Raises:
            ForgedError: the other end has not sent this.
            OSError: the connection has ended.
        """
        self._socket.settimeout(timeout)
        parts = []
        while True:
            kind, length = HEADER.unpack(self._read_sealed(HEADER.size))
            if self._is_first and length > _MAX_FIRST:
                raise ForgedError(f"found a first message of {length} bytes: it is somebody else's")
            parts.append(self._read_sealed(length))
            if kind != _PART:
                self._is_first = False
                self._socket.settimeout(None)
                return kind, parts

    def _send_frame(self, kind: bytes, body: Part) -> None:
        header = HEADER.pack(kind, len(body))
        self._socket.sendall(header + self._mine.tag(header))
        self._socket.sendall(body)
        self._socket.sendall(self._mine.tag(body))

    def _read_sealed(self, length: int) -> bytearray:
        received = self._read(length)
        tag = self._read(self._theirs.size)
        if not hmac.compare_digest(self._theirs.tag(received), tag):
            sender = f"rank {self.rank}" if self._is_launchers else "the launcher"
            raise ForgedError(
                f"what came from {sender} was not sent by it: somebody else writes to the "
                "connection, or something on the way changes what passes"
            )
        return received

    def _read(self, length: int) -> bytearray:
        received = bytearray(length)
        view, done = memoryview(received), 0
        while done < length:
            count = self._socket.recv_into(view[done : done + _MAX_READ])
            if not count:
                raise ConnectionError("the other end has closed the connection")
            done += count
        return received


def notes(path: str) -> memoryview:
    """Return the notes in a file, to be read or changed; only zeros where there is none."""
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), NOTES_SIZE)).cast("q")
    except (OSError, ValueError):
        return memoryview(bytearray(NOTES_SIZE)).cast("q")


def first_of(names: Sequence[str], default: str) -> str:
    """Return the value of the first of these environment variables that is set."""
    return next((os.environ[name] for name in names if name in os.environ), default)


def rank_here() -> int:
    """Return the rank that the process manager has given this process; 0 without one."""
    return int(first_of(RANK, "0"))


def connect(address: str, rank: int, environment: Mapping[str, str]) -> Channel:
    """Connect this rank to the launcher.

    Args:
        address: the launcher's: the path of a socket; or a port, behind all the names that its
            host may be known by: ``node1,10.0.0.1@4711``.
        environment: where the job's key is, and what the process manager calls this host.

    Raises:
        OSError: the launcher cannot be reached, or either end does not know the key.
    """
    connected = _dial(address)
    try:
        connected.settimeout(_SECONDS_TO_ANSWER)
        key = bytes.fromhex(environment.get(KEY, ""))
        if not key and os.sep not in address:
            raise ConnectionError(f"{KEY} is not set here; have mpirun carry it to this host")
        channel = Channel(connected, key, False)
        host = os.uname().nodename
        names = dict.fromkeys([environment.get("PMIX_HOSTNAME") or host, host])
        channel.send(HELLO, " ".join([str(rank), *names]).encode())
        channel.receive(_SECONDS_TO_ANSWER)
    except ForgedError:
        connected.close()
        raise ForgedError("the launcher does not know the job's key") from None
    except OSError as error:
        connected.close()
        raise ConnectionError(f"the connection to the launcher has failed: {error}") from None
    return channel


@contextlib.contextmanager
def short(path: str) -> Iterator[str]:
    """Provide a name of a file that the address of a socket has room for."""
    if len(os.fsencode(path)) <= _MAX_PATH:
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
        except OSError as error:
            dialed.close()
            raise ConnectionError(f"found no launcher at {address}: {error}") from None
        return dialed
    hosts, _, port = address.rpartition("@")
    reasons = []
    for host in hosts.split(","):
        try:
            return socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER)
        except OSError as error:
            reasons.append(f"{host}: {error}")
    raise ConnectionError(
        f"host {socket.gethostname()} cannot reach the launcher on port {port} "
        f"({'; '.join(reasons)}); allow connections between the hosts"
    )
