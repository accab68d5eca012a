"""All ranks in one process, as threads: for tests of the order of events."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from hvdlite.base.interrupts import Interrupted
from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.transport.transport import OnWait, Transport

SECONDS = 20.0
_POLL_SECONDS = 1e-4


def on_all_ranks(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """Call a function in one thread for each argument; return the results, or raise an error."""
    results: list[Any] = [None] * len(arguments)
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = function(arguments[rank])
        except BaseException as error:
            errors.append(error)

    # Daemons, so that one which hangs does not keep the tests from ending.
    threads = [
        threading.Thread(target=call, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(len(arguments))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]
    hanging = [thread.name for thread in threads if thread.is_alive()]
    if hanging:
        raise TimeoutError(f"{hanging} still run after {SECONDS} s")
    return results


class Simulation:
    """A communicator whose ranks are threads of this process.

    The k-th collective of each rank meets the k-th of the others. Where MPI would hang or mix up
    its buffers, because ranks call different collectives or one does not call any, every rank that
    has arrived gets an error.

    Args:
        size: the number of ranks.
        timeout: seconds to wait for ranks that are late to a collective other than
            `Transport.meet`, whose ``on_wait`` decides.

    Attributes:
        transports: one for each rank.
        calls: for each rank the names of the collectives that it has entered.
    """

    def __init__(self, size: int, timeout: float = 10.0) -> None:
        self.size = size
        self.calls: list[list[str]] = [[] for _ in range(size)]
        self.transports = [SimulatedTransport(self, rank) for rank in range(size)]
        self._timeout = timeout
        self._incomplete: dict[int, dict[int, tuple[str, Any]]] = {}  # by number
        self._held: set[int] = set()
        self._gone: set[int] = set()
        self._interrupted: dict[int, dict[int, tuple[str, Any]]] = {}  # by rank
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, rank: int) -> Iterator[None]:
        """Keep a rank from entering a collective in this context, as if it were late."""
        with self._changed:
            self._held.add(rank)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(rank)
                self._changed.notify_all()

    def meet(self, rank: int, call: str, given: Any, on_wait: OnWait | None = None) -> list[Any]:
        """Wait for all ranks, and return what each has given.

        Raises:
            HorovodInternalError: a rank has not arrived in time, or entered another collective.
        """
        entered = self._interrupted.pop(rank, None) or self._arrive(rank, call, given)
        try:
            self._wait(entered, call, on_wait)
        except Interrupted:
            self._interrupted[rank] = entered
            raise
        calls = {rank: entered[rank][0] for rank in range(self.size)}
        if len(set(calls.values())) > 1:
            raise HorovodInternalError(f"the ranks entered different collectives: {calls}")
        return [entered[rank][1] for rank in range(self.size)]

    def leave(self, rank: int) -> None:
        """Mark a rank as ended, for those that wait for it in `Transport.meet`."""
        with self._changed:
            self._gone.add(rank)

    def check_alive(self, rank: int) -> None:
        """Raise if another rank has left.

        Raises:
            RankGoneError: one has.
        """
        for other in sorted(self._gone - {rank}):
            raise RankGoneError(f"rank {other} has ended; see what ended it")

    def missing(self, rank: int) -> list[int]:
        """Return the ranks that are missing in the collective that a rank has entered last."""
        with self._changed:
            here = self._incomplete.get(len(self.calls[rank]) - 1)
            return [other for other in range(self.size) if here is not None and other not in here]

    def _arrive(self, rank: int, call: str, given: Any) -> dict[int, tuple[str, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: rank not in self._held)
            entered = self._incomplete.setdefault(len(self.calls[rank]), {})
            self.calls[rank].append(call)
            entered[rank] = call, given
            if len(entered) == self.size:
                del self._incomplete[len(self.calls[rank]) - 1]
            self._changed.notify_all()
        return entered

    def _wait(self, entered: dict[int, Any], call: str, on_wait: OnWait | None) -> None:
        start = time.monotonic()
        while on_wait is not None and len(entered) < self.size:
            for rank in self._gone - set(entered):
                raise HorovodInternalError(
                    f"rank {rank} has ended while this rank waits for it; see what ended it"
                )
            on_wait(time.monotonic() - start)
            time.sleep(_POLL_SECONDS)
        with self._changed:
            if not self._changed.wait_for(lambda: len(entered) == self.size, self._timeout):
                missing = sorted(set(range(self.size)) - set(entered))
                raise HorovodInternalError(
                    f"no sign of ranks {missing} in {call} for {self._timeout} s"
                )


class SimulatedTransport(Transport):
    """One rank of a `Simulation`."""

    max_digests = 4  # few, so that tests reach the limit

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.size = simulation.size
        self._simulation = simulation

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        given = tuple(digests[: self.max_digests])
        everywhere = self._simulation.meet(self.rank, "meet", given, on_wait)
        aligned = zip(*everywhere, strict=False)
        return len([*takewhile(lambda digests: len({*digests}) == 1, aligned)])

    def absent(self) -> list[int]:
        return self._simulation.missing(self.rank)

    def check_alive(self) -> None:
        self._simulation.check_alive(self.rank)

    def leave(self) -> None:
        self._simulation.leave(self.rank)

    def gather(self, message: bytes) -> list[bytes]:
        return self._simulation.meet(self.rank, "gather", message)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        copies = [piece.copy() for piece in pieces]
        given = self._simulation.meet(self.rank, "alltoall", copies)
        for target, theirs in zip(result, given, strict=True):
            target[...] = theirs[self.rank]

    def broadcast(self, array: Any, root: int) -> None:
        array[...] = self._simulation.meet(self.rank, "broadcast", array.copy())[root]

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
