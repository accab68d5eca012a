"""Operation: one collective in a lane, and what ranks compare of it."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from hvdlite.engine.calls import Call
from hvdlite.engine.handle import Handle
from hvdlite.engine.memory import Extent
from hvdlite.observe import timeline
from hvdlite.transport import Transport

if TYPE_CHECKING:
    from hvdlite.engine.device import DeviceMemory
    from hvdlite.transport.gpu.cuda import Event

# A program submits the same names step after step.
_MAX_DIGESTS = 4096
# Where digests are cached and under which name, oldest first.
_cached: deque[tuple[dict[str, tuple[str, bytes]], str]] = deque()


class Signature(tuple[tuple[str, Any], ...]):
    """The properties that must be equal on all ranks: ("dtype", "float32"), ("shape", (3, 4))."""

    @cached_property
    def digest(self) -> bytes:
        """A hash of 16 bytes."""
        return hashlib.blake2b(repr(tuple(self)).encode(), digest_size=16).digest()

    @cached_property
    def prefix(self) -> str:
        """The beginning of keys: the kind of the operation, if the signature tells it."""
        label, kind = self[0] if self else ("", "")
        return f"{kind}." if label == "the operation" else ""

    @cached_property
    def known(self) -> dict[str, tuple[str, bytes]]:
        """The key and the digest of operations without a payload, by name."""
        return {}


class Operation(ABC):
    """One collective, submitted under a name by every rank of a lane.

    Args:
        name: Name, the same on all ranks. Submissions with the same name and kind belong together;
            the signature begins with the kind.
        signature: Properties that must be equal on all ranks.
        payload: Data that all ranks need and that may differ: the number of rows to gather, the
            gradients that are present.
        failure: Why this rank cannot take part. The operation then fails on all ranks, so that none
            waits for this one.

    Attributes:
        key: Kind and name, ``allreduce.loss``. As in Horovod, operations of different kinds may be
            in flight under one name.
        nbytes: Number of bytes that it moves, if that is known.
        sent: Number of bytes that its last execution has sent, if that is counted.
        submitted: Time of the submission, by ``time.monotonic``.
        note: Added to the name in messages.
        memory: The device memory of its arrays; None: they are on the host.
        ready: Events for which the device waits before it executes the operation.
        tensors: Tensors that the device uses, once the operation has been executed.
        inline_data: A flat array that may travel with the digests; None: there is none.
        places: The send and the result array of its plain allreduce, see `Transport.announce`; None
            on all ranks if it may not be one.
        lane: The name of the lane that it has been submitted to.
        handle: Handle that delivers the result; set at the submission.
        stands_in: Whether ranks that have joined can take part, see `stand_in`.
        stall_exempt: Whether it may wait for the other ranks without limit and without a report.
        joins: Whether it announces that this rank has joined.
        root: The id of the only rank that sends data; None: all do.
        may_use_memory_twice: Whether its own arrays may overlap.
        is_protected: Whether `protect` has been called since its submission.
        call: The user's call that made it, if that has no name.
    """

    handle: Handle
    call: Call | None = None
    note = ""
    memory: DeviceMemory | None = None
    ready: Sequence[Event] = ()
    tensors: Sequence[Any] = ()
    inline_data: Any = None
    places: tuple[Any, Any] | None = None
    nbytes = 0
    sent = 0
    stands_in = False
    stall_exempt = False
    joins = False
    root: int | None = None
    may_use_memory_twice = False
    is_protected = False
    lane = ""
    submitted = 0.0

    def __init__(
        self,
        name: str,
        signature: Signature,
        payload: bytes = b"",
        failure: str | None = None,
    ) -> None:
        self.name = name
        self.payload = payload
        self.failure = failure
        self.sign(signature)

    def sign(self, signature: Signature) -> None:
        """Replace the signature by one that begins with the same kind."""
        self.signature = signature
        known = signature.known.get(self.name) if isinstance(self.name, str) else None
        self.key, self._digest = known or self._remember()

    def extents(self) -> Sequence[Extent]:
        """Return the caller's memory that it uses, and that no other operation may write."""
        return ()

    @property
    def title(self) -> str:
        """Its name for messages, with an addition for users who did not choose it."""
        if self.call is not None and self.call.place.lines:
            return f"{self.name!r} ({self.call.place.lines[0]})"
        return repr(self.name) + self.note

    @property
    def activity(self) -> str:
        """Its name in the timeline."""
        label, kind = self.signature[0] if self.signature else ("", "")
        return kind.split()[0].upper() if label == "the operation" else timeline.ALLREDUCE

    @property
    def traced_name(self) -> str:
        """The name of its tensor in the timeline, with the kind in front: ``allreduce.loss``."""
        prefix = f"{self.activity.lower()}." if self.signature.prefix else ""
        return self.name if self.name.startswith(prefix) else prefix + self.name

    @property
    def digest(self) -> bytes:
        """A hash of 16 bytes, by which ranks compare name, signature and payload."""
        failed = self.failure is not None
        if (call := self.call) is not None:
            # Cached without the number, which is another one each time.
            found = _digest(call.kind, call.agreed + self.payload, self.signature.digest, failed)
            return found[:10] + call.number.to_bytes(6, "little")
        if self.payload or failed:
            return _digest(self.name, self.payload, self.signature.digest, failed)
        return self._digest

    def _remember(self) -> tuple[str, bytes]:
        """Return the key and the digest, and cache them: each step of a program needs them."""
        if not isinstance(self.name, str):
            kind = type(self.name).__name__
            raise ValueError(f"name={self.name!r} is of type {kind}; expected a string, or None")
        if isinstance(self.name, Call):  # the only one of this name
            self.call = call = self.name.whole or self.name
            call.signature = self.signature.digest
            call.key = self.signature.prefix + self.name
            return call.key, b""
        known = self.signature.known
        digest = _digest(self.name, b"", self.signature.digest, False)
        known[self.name] = found = self.signature.prefix + self.name, digest
        # One bound for all signatures.
        _cached.append((known, self.name))
        if len(_cached) > _MAX_DIGESTS:
            names, oldest = _cached.popleft()
            names.pop(oldest, None)
        return found

    @property
    def fusion(self) -> Hashable | None:
        """A key. Operations with equal keys may run in one `execute_together`; None: alone."""
        return None

    def stand_in(self) -> Callable[[], Operation]:
        """Return a function that makes the operation by which a joined rank takes part.

        `Rounds._stand_in` pickles the function and sends it to that rank. Its operation issues the
        same collectives, with zeros for data. The payloads of joined ranks are empty.
        """
        raise NotImplementedError(f"{type(self).__name__} needs every rank's data")

    def protect(self) -> None:  # noqa: B027 - most operations change nothing that they read
        """Keep what `execute` changes of the operation's input and state.

        It is called before `execute`, where the ranks confirm each outcome (`Transport.confirms`).
        """

    def restore(self) -> None:  # noqa: B027
        """Restore what `protect` has kept: a rank has died, and the operation runs again."""

    def go_on(self, members: Sequence[int]) -> None:
        """Adapt a pending operation to a world of these ids, without the ranks that have died."""
        if self.root is not None and self.root not in members:
            self.failure = (
                f"{self.title} was lost: rank {self.root}, which was to send it, has died"
            )

    def contribution(self, name: str) -> str:
        """Return the name of a contribution of floats that this rank makes; empty: it makes none.

        Args:
            name: of the array or of the parameter; empty: the first gradient.
        """
        return ""

    def corrupt(self, name: str, value: float) -> None:
        """Set the first entry of a contribution, for a rehearsal; called before the submission.

        Args:
            name: that `contribution` has returned.
            value: of any size; what the dtype cannot hold becomes infinite.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no contribution")

    @abstractmethod
    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Run the collective, and return the handle's result.

        Args:
            transport: The lane's, of the memory that the arrays lie in; every rank is in the same
                call. That of a device takes `hvdlite.transport.gpu.base.FlatArray`.
            payloads: Every rank's payload, by rank.
        """

    def execute_together(self, others: Sequence[Any], transport: Transport) -> list[Any]:
        """Run this and other operations of the same fusion key, which is not None, as one.

        Returns:
            The handles' results, this one's first.
        """
        raise NotImplementedError(f"{type(self).__name__} runs alone")


@lru_cache(_MAX_DIGESTS)
def _digest(name: str, payload: bytes, signature: bytes, failed: bool) -> bytes:
    encoded = name.encode()
    lengths = struct.pack("<QQ?", len(encoded), len(payload), failed)
    content = lengths + encoded + payload + signature
    return hashlib.blake2b(content, digest_size=16).digest()


class Barrier(Operation):
    """A wait for every rank, done by the round in which they agree on it and on ``entries``."""

    def __init__(self, name: str, entries: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(name, Signature((("the operation", "barrier"), *entries)))

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Do nothing more."""


class Gather(Operation):
    """An exchange of short payloads, done by the round in which the ranks agree on it.

    Its result is every rank's payload, by rank; that of a rank that has joined is empty.
    """

    stands_in = True

    def stand_in(self) -> Callable[[], Operation]:
        return partial(Gather, self.name, self.signature)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Sequence[bytes]:
        return payloads
