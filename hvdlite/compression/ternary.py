"""Values as one of three, in 2 bits."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvdlite.compression.codec import Codec
from hvdlite.compression.packing import pack, packed_size, unpack

_BITS = 2
# The fourth code is never written.
_VALUES = (-1.0, 0.0, 1.0, 0.0)


class TernaryCodec(Codec):
    """Each value as a negative, a zero or a positive of one magnitude."""

    def body(self, count: int) -> int:
        """Two bits each."""
        return packed_size(count, _BITS)

    def write(self, values: Any, head: Any, out: Any) -> None:
        """Pack the codes."""
        pack(self.codes(values, head), _BITS, out)

    def read(self, body: Any, head: Any, out: Any) -> None:
        """Multiply by the magnitude."""
        unpack(_VALUES, body, out)
        out *= self.magnitude(head)

    @abstractmethod
    def codes(self, values: Any, head: Any) -> Any:
        """Return 0, 1 or 2 for what is to become negative, zero or positive; uint8."""

    @abstractmethod
    def magnitude(self, head: Any) -> Any:
        """Return the magnitude, from the message's head."""


def codes_of(positive: Any, negative: Any) -> Any:
    """Return codes of values, given as bools which of them are to be positive, and negative."""
    codes = positive.view("u1") + 1
    codes -= negative.view("u1")
    return codes
