"""Virtual ranks: a fixed number of ranks, of which each process plays some.

What they compute together does not depend on how many processes there are: sums follow one tree,
whose leaves are the virtual ranks, and everything else is done for each virtual rank by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from hvdlite.base.arrays import as_bytes, slice_bounds
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.errors import HorovodInternalError
from hvdlite.transport.reduce import reduce_into
from hvdlite.transport.transport import OnWait, Transport

#: A part of the tree: its first leaf, and the one after its last.
Node = tuple[int, int]
# A collective that a virtual rank has come to, and its arguments.
_Call = tuple[str, tuple[Any, ...]]
_BEGIN, _END = "the beginning", "the end"  # to which they come together, too


def largest_nodes(leaves: Collection[int], first: int, stop: int) -> list[Node]:
    """Return the largest parts of a tree all of whose leaves are given, from left to right."""
    present = sum(leaf in leaves for leaf in range(first, stop))
    if present in (0, stop - first):
        return [(first, stop)] if present else []
    middle = (first + stop) // 2
    return largest_nodes(leaves, first, middle) + largest_nodes(leaves, middle, stop)


def add_up(parts: Mapping[Node, Any], first: int, stop: int) -> Any:
    """Return the sum over a tree's leaves, of which some parts have been added up already.

    Whoever adds up the same leaves gets the same bits, whichever parts are given; these stay.
    """
    if (first, stop) in parts:
        return parts[first, stop]
    middle = (first + stop) // 2
    left, right = add_up(parts, first, middle), add_up(parts, middle, stop)
    # The sum of a part that has not been given is an array of its own.
    return np.add(left, right, out=None if (first, middle) in parts else left)


class VirtualRanks:
    """The virtual ranks of a job, and the processes that play them.

    Args:
        players: for each process its virtual ranks, ascending and at least one. If several have the
            same one, all of them do the same for it, and the first one speaks for it.
    """

    def __init__(self, transport: Transport, players: Sequence[Sequence[int]]) -> None:
        self.transport = transport
        self.players = players
        self.own = players[transport.rank]
        speakers: dict[int, int] = {}
        for process, ranks in enumerate(players):
            for rank in ranks:
                speakers.setdefault(rank, process)
        self.size = len(speakers)
        self.spoken = [[r for r in players[p] if speakers[r] == p] for p in range(len(players))]
        self._turn = threading.Lock()  # of the virtual rank that runs
        self._calls: list[_Call] = [("", ())] * len(self.own)
        self._answers: Sequence[Any] = ()
        self._errors: dict[int, BaseException] = {}  # by position

    def run(self, work: Callable[[VirtualTransport], object]) -> None:
        """Run a function for each of this process's virtual ranks, which call collectives in it.

        All processes run it. One virtual rank runs at a time, until its next collective, so that
        the function needs no locks.

        Raises:
            BaseException: what the function raises for the first virtual rank that fails in it; the
                others run on to their next collective.
            RuntimeError: a thread cannot be started.
        """
        transports = [VirtualTransport(self, position) for position in range(len(self.own))]
        self._meeting = threading.Barrier(len(transports), self._perform)
        errors = self._errors = {}

        def play(position: int) -> None:
            # numpy's error handling is that of a thread.
            with self._turn, np.errstate(all="ignore"):
                try:
                    self.call(position, _BEGIN)
                    work(transports[position])
                except BaseException as error:
                    errors[position] = error
                try:
                    self.call(position, _END)
                except BaseException as error:
                    errors.setdefault(position, error)

        threads: list[threading.Thread] = []
        try:
            for position, rank in enumerate(self.own[1:], start=1):
                name = f"hvdlite-virtual-{rank}"
                thread = threading.Thread(target=play, args=(position,), name=name, daemon=True)
                thread.start()
                threads.append(thread)
        except BaseException as error:
            errors[-1] = error
            self._meeting.abort()
        play(0)
        for thread in threads:
            thread.join()
        for _, failure in sorted(errors.items()):
            if not isinstance(failure, threading.BrokenBarrierError):  # another one has failed
                raise failure

    def call(self, position: int, method: str, *arguments: Any) -> Any:
        """Run a collective together with this process's other virtual ranks; return its result."""
        self._calls[position] = method, arguments
        self._turn.release()
        try:
            self._meeting.wait()
        finally:
            self._turn.acquire()
        return self._answers[position]

    def _perform(self) -> None:
        """Run the collective to which all virtual ranks of this process have come."""
        method = self._calls[0][0]
        if any(other != method for other, _ in self._calls):
            if self._errors:
                raise threading.BrokenBarrierError
            pairs = zip(self.own, self._calls, strict=True)
            found = ", ".join(f"{other} ({rank})" for rank, (other, _) in pairs)
            raise HorovodInternalError(
                f"the virtual ranks of process {self.transport.rank} do not run the same "
                f"collectives: {found}"
            )
        answers = None
        if method not in (_BEGIN, _END):
            answers = getattr(self, f"_{method}")([arguments for _, arguments in self._calls])
        self._answers = answers or [None] * len(self.own)

    def _gather(self, arguments: Sequence[tuple[bytes]]) -> list[Any]:
        own = {rank: message for rank, (message,) in zip(self.own, arguments, strict=True)}
        messages: dict[int, bytes] = {}
        for spoken, found in zip(self.spoken, self.transport.gather_objects(own), strict=True):
            messages.update((rank, found[rank]) for rank in spoken)
        return [[messages[rank] for rank in range(self.size)]] * len(self.own)

    def _alltoall(self, arguments: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> None:
        by_rank = dict(zip(self.own, arguments, strict=True))
        spoken = self.spoken[self.transport.rank]
        pieces = [
            _joined([by_rank[source][0][target] for source in spoken for target in targets])
            for targets in self.players
        ]
        targets = [
            [by_rank[target][1][source] for source in sources for target in self.own]
            for sources in self.spoken
        ]
        _receive(self.transport.alltoall, pieces, targets)

    def _allgather(self, arguments: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        own = dict(zip(self.own, (piece for piece, _ in arguments), strict=True))
        piece = _joined([own[rank] for rank in self.spoken[self.transport.rank]])
        _, first = arguments[0]
        targets = [[first[rank] for rank in ranks] for ranks in self.spoken]
        _receive(self.transport.allgather, piece, targets)
        for _, others in arguments[1:]:
            for source, target in zip(first, others, strict=True):
                target[...] = source

    def _allreduce(self, arguments: Sequence[tuple[Any, Any, ReduceOp, Scaling]]) -> None:
        sends = {rank: send for rank, (send, *_) in zip(self.own, arguments, strict=True)}
        _, result, op, scaling = arguments[0]
        dtype = result.dtype
        # Sums of 16-bit floats are kept in float32, so their parts cannot travel.
        adds_up = op is ReduceOp.SUM and dtype in (np.float32, np.float64)
        parts = {(r, r + 1): sends[r] for r in self.spoken[self.transport.rank]}
        nodes = [_nodes(spoken, self.size, adds_up) for spoken in self.spoken]
        own = [add_up(parts, *node) for node in nodes[self.transport.rank]]
        bounds = slice_bounds(result.size, self.transport.size)
        pieces = [
            _joined([as_bytes(part[start:stop]) for part in own])
            for start, stop in pairwise(bounds)
        ]
        start, stop = bounds[self.transport.rank : self.transport.rank + 2]
        rows = [np.empty((len(each), stop - start), dtype) for each in nodes]
        self.transport.alltoall(pieces, [as_bytes(each.reshape(-1)) for each in rows])
        by_node = {
            node: row
            for each, many in zip(nodes, rows, strict=True)
            for node, row in zip(each, many, strict=True)
        }
        total = np.empty(stop - start, dtype)
        if adds_up:
            scaling.write(add_up(by_node, 0, self.size), total)
        else:
            in_order = [by_node[rank, rank + 1] for rank in range(self.size)]
            reduce_into(total, in_order, op, scaling)
        self.transport.gather_slices(total, result)
        for _, other, *_ in arguments[1:]:
            other[...] = result


def _nodes(leaves: Sequence[int], size: int, adds_up: bool) -> list[Node]:
    return largest_nodes(leaves, 0, size) if adds_up else [(leaf, leaf + 1) for leaf in leaves]


def _joined(pieces: Sequence[Any]) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([*pieces, np.empty(0, np.uint8)])


def _receive(
    collective: Callable[[Any, Sequence[Any]], None], send: Any, targets: Sequence[Sequence[Any]]
) -> None:
    """Run a collective that receives from each process what belongs into several byte arrays."""
    buffers = [np.empty(sum(each.size for each in many), np.uint8) for many in targets]
    collective(send, buffers)
    for buffer, many in zip(buffers, targets, strict=True):
        start = 0
        for target in many:
            target[...] = buffer[start : start + target.size]
            start += target.size


class VirtualTransport(Transport):
    """The collectives of one virtual rank, for the strategies of `hvdlite.compression`."""

    title = "virtual ranks"

    def __init__(self, ranks: VirtualRanks, position: int) -> None:
        self._call = partial(ranks.call, position)
        self.rank = ranks.own[position]
        self.size = ranks.size
        self.members = range(ranks.size)
        self.lane = ranks.transport.lane

    def gather(self, message: bytes) -> list[bytes]:
        messages: list[bytes] = self._call("gather", message)
        return messages

    def allreduce(self, send: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce over the virtual ranks: float32 and float64 along the tree, others in order."""
        self._call("allreduce", send, result, op, scaling)

    def alltoall(self, pieces: Sequence[Any], result: Sequence[Any]) -> None:
        self._call("alltoall", pieces, result)

    def allgather(self, piece: Any, result: Sequence[Any]) -> None:
        self._call("allgather", piece, result)

    def broadcast(self, array: Any, root: int) -> None:
        """Send the root's array in the place of what `allgather` takes from all."""
        whole = as_bytes(array)
        pieces = [whole if rank == root else whole[:0] for rank in range(self.size)]
        self.allgather(pieces[self.rank], pieces)

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> NoReturn:
        """Refuse: the processes have met already."""
        raise NotImplementedError("virtual ranks meet as processes")

    def leave(self) -> NoReturn:
        raise NotImplementedError("virtual ranks leave as processes")

    def close(self) -> None:
        """Do nothing: the processes' transport is closed by its owner."""
