"""Operations of the engine itself, which carry no arrays."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hvdlite.engine.operation import Operation, Signature
from hvdlite.transport import Transport


class Barrier(Operation):
    """A wait for every rank, done by the round in which the ranks agree on it.

    Args:
        name: Name of the operation.
        entries: Further entries of the signature, which must be equal on all ranks.
    """

    def __init__(self, name: str, entries: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(name, Signature((("the operation", "barrier"), *entries)))

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Do nothing more."""


class Join(Operation):
    """A wait until every rank has joined; until then this one takes part with zeros.

    Args:
        name: Name of the operation.
    """

    patient = joins = True

    def __init__(self, name: str) -> None:
        super().__init__(name, Signature((("the operation", "join"),)))

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> int:
        """Return the global rank that joined last."""
        waited = time.monotonic() - self.submitted
        messages = transport.gather(struct.pack("<d", waited))
        times = [struct.unpack("<d", message)[0] for message in messages]
        return transport.members[times.index(min(times))]
