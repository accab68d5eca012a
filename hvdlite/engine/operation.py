"""An operation on its way through a lane."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvdlite.engine.handle import Handle
from hvdlite.transport import Transport

#: Pairs of what must be equal on all ranks: ("dtype", "float32"), ("shape", (3, 4)), ...
Signature = tuple[tuple[str, Any], ...]


def digest(signature: Signature) -> bytes:
    """16 bytes that stand for a signature."""
    return hashlib.blake2b(repr(signature).encode(), digest_size=16).digest()


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
    """

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
        self.handle = Handle(name)
        label, kind = signature[0] if signature else ("", "")
        self.key = f"{kind}.{name}" if label == "the operation" else name

    def digest(self) -> bytes:
        """A digest of the signature, 16 bytes."""
        return digest(self.signature)

    def word(self) -> bytes:
        """What ranks compare to see that they are about to do the same."""
        name = self.name.encode()
        failed = b"" if self.failure is None else b"failed"
        content = struct.pack("<QQ", len(name), len(self.payload)) + name + self.payload
        return hashlib.blake2b(content + self.digest() + failed, digest_size=16).digest()

    @abstractmethod
    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Run the collective, and return the handle's result.

        Args:
            transport: the lane's; every rank is in the same call.
            payloads: every rank's payload, by rank.
        """
