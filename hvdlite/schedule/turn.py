"""What ranks agree on before they exchange weights."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial

from hvdlite.engine import Operation
from hvdlite.engine.operation import Signature
from hvdlite.transport import Transport

_STEPS = struct.Struct("<q")


class Turn(Operation):
    """The meeting before an exchange, in which ranks learn the greatest number of steps.

    Numbers differ where a rank has joined, and has come back: it then follows the others.

    Args:
        name: of the operation.
        signature: what must be equal on all ranks.
        steps: that this rank has made.
        stands_in: whether it goes on without ranks that have joined.
    """

    def __init__(self, name: str, signature: Signature, steps: int, stands_in: bool) -> None:
        super().__init__(name, signature, payload=_STEPS.pack(steps))
        self.stands_in = stands_in

    def stand_in(self) -> Callable[[], Operation]:
        """What takes part in it without steps of its own."""
        return partial(_Missed, self.name, self.signature)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> int:
        """Return the greatest number of steps."""
        return max(int(_STEPS.unpack(payload)[0]) for payload in payloads if payload)


class _Missed(Operation):
    """The turn of a rank that has joined."""

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> None:
        """Do nothing."""
