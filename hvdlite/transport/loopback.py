"""The transport of a single rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport.transport import OnWait, Transport
from hvdlite.world.world import World


class Loopback(Transport):
    """A transport that returns what it is given."""

    title = "one rank"
    rank = 0
    size = 1
    max_digests = 1024

    @classmethod
    def connect(cls, MPI: Any, world: World, barrier: Any) -> Transport | None:  # noqa: N803
        return cls() if world.comm.size == 1 else None

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        """Agree with oneself."""
        return min(len(digests), self.max_digests)

    def leave(self) -> None:
        """Do nothing: there is no other rank."""

    def confirm(self) -> None:
        """Do nothing: this rank has it."""

    def gather(self, message: bytes) -> list[bytes]:
        return [message]

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        self.scale(send, result, scaling)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        result[0][...] = pieces[0]

    def broadcast(self, array: Any, root: int) -> None:
        """Leave the array as it is."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
