"""The transport of a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport.base import Patience, Transport


class Loopback(Transport):
    """What arrives is what was sent."""

    rank = 0
    size = 1
    most_words = 1024

    def meet(self, words: Sequence[bytes], patience: Patience, cargo: Sequence[Any] = ()) -> int:
        """Agree with oneself."""
        return min(len(words), self.most_words)

    def leave(self) -> None:
        """Have nobody to tell."""

    def gather(self, message: bytes) -> list[bytes]:
        """Return the one message."""
        return [message]

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Copy and scale."""
        if result is not send:
            result[...] = send
        result[...] = scaling.apply(result)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        """Copy the one piece."""
        result[0][...] = pieces[0]

    def broadcast(self, array: Any, root: int) -> None:
        """Leave the array as it is."""

    def close(self) -> None:
        """Hold nothing, give nothing back."""
