"""NCCL without devices: communicators whose ranks are threads of one process.

They get addresses and counts as the real ones do, and send what has to be done to the
streams of a `FakeNode`. Reductions are made in the type of the elements, and Min and Max drop
NaN, as in NCCL.
"""

from __future__ import annotations

import ctypes
import threading

import ml_dtypes
import numpy as np

SECONDS = 10.0
_NCCL_TYPES = {
    0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64,
    6: np.float16, 7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16,
}  # fmt: skip
_NCCL_OPS = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin, 4: np.add}


class FakeNcclError(RuntimeError):
    pass


_groups = threading.local()


def group_start():
    assert getattr(_groups, "calls", None) is None, "a group in a group"
    _groups.calls = []


def group_end():
    calls, _groups.calls = _groups.calls, None
    for communicator, stream, meetings in _merged(calls):
        communicator.send_off(stream, "group", meetings)


def _merged(calls):
    for communicator, stream in {(communicator, stream) for communicator, stream, _ in calls}:
        yield (
            communicator,
            stream,
            [meeting for made, on, meeting in calls if (made, on) == (communicator, stream)],
        )


class _Meeting:
    """A collective, or a send and its receive: it happens when all members are there."""

    def __init__(self, members):
        self.members = members
        self.calls = {}
        self.happened = False

    def join(self, rank, call):
        self.calls[rank] = call
        if set(self.calls) == set(self.members):
            _perform([self.calls[member] for member in self.members])
            self.happened = True


class _Communication:
    """A task that is complete when all its meetings have happened, or its rank has aborted."""

    def __init__(self, name, communicator, meetings):
        self.name = name
        self.communicator = communicator
        self.meetings = meetings

    @property
    def complete(self):
        return self.communicator.aborted or all(made.happened for made, _ in self.meetings)

    def run(self, node, visiting):
        rank = self.communicator.rank
        moved = False
        for meeting, call in self.meetings:
            if rank not in meeting.calls:
                meeting.join(rank, call)
                moved = True
            for member in set(meeting.members) - set(meeting.calls):
                peer = node.communicators.get(member)
                if peer is not None and peer.stream is not None:
                    moved |= node.advance(node.streams[peer.stream], visiting)
        return moved


class FakeCommunicator:
    """The methods of cupy's ``NcclCommunicator``, with its arguments."""

    def __init__(self, node, size, rank):
        self.rank = rank
        self.stream = None
        self.aborted = self.destroyed = False
        self.aborts = 0
        self.async_error = None
        self.call_error = None
        self._node = node
        self._size = size
        self._counts = {}
        with node.lock:
            node.communicators[rank] = self
            node.connected += 1
            node.lock.notify_all()
            there = node.lock.wait_for(lambda: len(node.communicators) == size, SECONDS)
        if not there:
            raise FakeNcclError("remote process exited or there was a network error")

    def allReduce(self, send, receive, count, datatype, op, stream):  # noqa: N802
        self._exchange("allReduce", (send, receive, count, datatype, op), stream)

    def allGather(self, send, receive, count, datatype, stream):  # noqa: N802
        self._exchange("allGather", (send, receive, count, datatype), stream)

    def broadcast(self, send, receive, count, datatype, root, stream):
        self._exchange("broadcast", (send, receive, count, datatype, root), stream)

    def send(self, pointer, count, datatype, peer, stream):
        self._pair("send", (pointer, count, datatype), (self.rank, peer), stream)

    def recv(self, pointer, count, datatype, peer, stream):
        self._pair("recv", (pointer, count, datatype), (peer, self.rank), stream)

    def check_async_error(self):
        self._check_alive()
        if self.async_error is not None:
            raise FakeNcclError(self.async_error)

    def abort(self):
        with self._node.lock:
            self.aborted = True
            self.aborts += 1
            self._node.lock.notify_all()

    def destroy(self):
        self._check_alive()
        self.destroyed = True

    def send_off(self, stream, name, meetings):
        self.stream = stream
        self._node.push(stream, _Communication(name, self, meetings))

    def _exchange(self, name, arguments, stream):
        meeting = self._meeting("collective", tuple(range(self._size)))
        self._call(stream, name, (meeting, (name, arguments)))

    def _pair(self, name, arguments, pair, stream):
        assert pair[0] != pair[1]
        assert arguments[1], "an empty message"
        self._call(stream, name, (self._meeting(pair, pair), (name, arguments)))

    def _call(self, stream, name, meeting):
        self._check_alive()
        if self.call_error is not None:
            raise FakeNcclError(self.call_error)
        if getattr(_groups, "calls", None) is None:
            self.send_off(stream, name, [meeting])
        else:
            _groups.calls.append((self, stream, meeting))

    def _meeting(self, kind, members):
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        with self._node.lock:
            return self._node.meetings.setdefault((kind, number), _Meeting(members))

    def _check_alive(self):
        if self.aborted or self.destroyed:
            raise FakeNcclError("invalid argument: this communicator has ended")


def _memory(pointer, count, datatype):
    dtype = np.dtype(_NCCL_TYPES[datatype])
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(raw, np.uint8).view(dtype)


def _perform(calls):
    names = tuple(name for name, _ in calls)
    arguments = [arguments for _, arguments in calls]
    if names == ("send", "recv"):
        source, target = (_memory(*mine) for mine in arguments)
        target[...] = source
        return
    # All arguments but the addresses have to be the same.
    assert len(set(names)) == 1, names
    assert len({mine[2:] for mine in arguments}) == 1, arguments
    _COLLECTIVES[names[0]](arguments)


def _all_reduce(arguments):
    op = arguments[0][4]
    rows = [_memory(send, count, kind) for send, _, count, kind, _ in arguments]
    with np.errstate(all="ignore"):
        total = rows[0].copy()
        for row in rows[1:]:
            total = _NCCL_OPS[op](total, row)
        total = total / total.dtype.type(len(rows)) if op == 4 else total
    for _, receive, count, kind, _ in arguments:
        _memory(receive, count, kind)[...] = total


def _all_gather(arguments):
    rows = [_memory(send, count, kind).copy() for send, _, count, kind in arguments]
    for _, receive, count, kind in arguments:
        _memory(receive, count * len(rows), kind)[...] = np.concatenate(rows)


def _broadcast(arguments):
    _, _, count, kind, root = arguments[0]
    values = _memory(arguments[root][0], count, kind).copy()
    for _, receive, count, kind, _ in arguments:
        _memory(receive, count, kind)[...] = values


_COLLECTIVES = {"allReduce": _all_reduce, "allGather": _all_gather, "broadcast": _broadcast}
