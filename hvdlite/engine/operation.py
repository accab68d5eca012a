"""An operation on its way through a lane."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from hvdlite import timeline
from hvdlite.engine.handle import Handle
from hvdlite.engine.overlap import Extent
from hvdlite.transport import Transport

# A program submits the same names step after step.
_MOST_WORDS = 4096
# Where names are known, and which, the oldest first.
_remembered: deque[tuple[dict[str, tuple[str, bytes]], str]] = deque()


class Signature(tuple[tuple[str, Any], ...]):
    """What must be equal on all ranks: ("dtype", "float32"), ("shape", (3, 4)), ..."""

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for it."""
        return hashlib.blake2b(repr(tuple(self)).encode(), digest_size=16).digest()

    @cached_property
    def prefix(self) -> str:
        """What keys begin with: the kind of the operation, if the signature tells it."""
        label, kind = self[0] if self else ("", "")
        return f"{kind}." if label == "the operation" else ""

    @cached_property
    def known(self) -> dict[str, tuple[str, bytes]]:
        """The key and the word of operations without a payload, by name."""
        return {}


def title(name: str, about: str) -> str:
    """Return what messages call an operation: ``'name'`` or ``'name' (about)``."""
    return f"{name!r} ({about})" if about else repr(name)


class Operation(ABC):
    """One collective, submitted under a name by every rank of a lane.

    Args:
        name: the same on all ranks; together with the kind, which the signature begins with,
            it says which submissions belong together.
        signature: what must be equal on all ranks.
        payload: what may differ, and every rank needs to know of every other: the
            number of rows to gather, which gradients are there.
        failure: why this rank cannot take part after all. The operation then fails on
            all ranks, instead of leaving the others waiting.

    Attributes:
        key: what the operation is called in its lane: ``allreduce.loss``. As in Horovod,
            operations of different kinds may be on their way under one name.
        nbytes: what it moves, as far as that is known.
        lane: the name of the lane it was submitted to.
        submitted: when that was, by ``time.monotonic``.
        memory: where its arrays lie, if that is on a device.
        handle: what is told of its end; set when it is submitted.
        stands_in: whether ranks that have joined can take part in it, see `stand_in`.
        patient: whether it may wait for the other ranks as long as it takes.
        joins: whether it says that this rank has joined.
        several: whether it may use some memory twice by itself.
    """

    handle: Handle
    several = False
    memory: Any = None
    nbytes = 0
    stands_in = False
    patient = False
    joins = False
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
        self.signature = signature
        self.payload = payload
        self.failure = failure
        self.key, self._word = signature.known.get(name) or self._remember()

    def extents(self) -> Sequence[Extent]:
        """The caller's memory that it reads and writes; no other operation may write to it."""
        return ()

    @property
    def about(self) -> str:
        """Return an addition to the name in messages, for users who did not choose it."""
        return ""

    @property
    def title(self) -> str:
        """Return its name for messages."""
        return title(self.name, self.about)

    @property
    def activity(self) -> str:
        """What the timeline calls it."""
        label, kind = self.signature[0] if self.signature else ("", "")
        return kind.split()[0].upper() if label == "the operation" else timeline.ALLREDUCE

    def word(self) -> bytes:
        """What ranks compare to see that they are about to do the same."""
        if self.payload or self.failure is not None:
            failed = self.failure is not None
            return _word(self.name, self.payload, self.signature.digest, failed)
        return self._word

    def _remember(self) -> tuple[str, bytes]:
        """The key and the word, which are the same in every step of a program."""
        if not isinstance(self.name, str):
            kind = type(self.name).__name__
            raise ValueError(f"name={self.name!r} is of type {kind}; expected a string, or None")
        known = self.signature.known
        word = _word(self.name, b"", self.signature.digest, False)
        known[self.name] = found = self.signature.prefix + self.name, word
        # Of all signatures together: calls without a name have a new one each time.
        _remembered.append((known, self.name))
        if len(_remembered) > _MOST_WORDS:
            names, oldest = _remembered.popleft()
            names.pop(oldest, None)
        return found

    @property
    def fusion(self) -> Hashable | None:
        """Operations of equal fusion may run together by `execute_together`; None: alone."""
        return None

    @property
    def cargo(self) -> Any:
        """What may be brought along when ranks meet for it: a flat array; None: nothing."""
        return None

    def stand_in(self) -> Callable[[], Operation]:
        """What makes the operation by which a rank takes part that has no data any more.

        It travels to that rank as a pickle. There the operation has this one's collectives, and
        zeros for data. Among the payloads, those of ranks that have joined are empty.
        """
        raise NotImplementedError(f"{type(self).__name__} needs every rank's data")

    @abstractmethod
    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Run the collective, and return the handle's result.

        Args:
            transport: the lane's; every rank is in the same call.
            payloads: every rank's payload, by rank.
        """

    def execute_together(self, others: Sequence[Any], transport: Transport) -> list[Any]:
        """Run this and other operations of the same, not empty, fusion as one.

        Returns:
            The handles' results, this one's first.
        """
        raise NotImplementedError(f"{type(self).__name__} runs alone")


@lru_cache(_MOST_WORDS)
def _word(name: str, payload: bytes, digest: bytes, failed: bool) -> bytes:
    encoded = name.encode()
    content = struct.pack("<QQ?", len(encoded), len(payload), failed) + encoded + payload + digest
    return hashlib.blake2b(content, digest_size=16).digest()
