"""Devices without a device: streams that run nothing before somebody has to see it.

What is sent to a `FakeNode`'s streams stays in their queues. Looking at an event runs what
the event depends on, and nothing else: the work before it in its stream, the events that
this waits for, and in other ranks' streams what a collective needs. Whatever is ordered by
luck alone has not happened then, and the data are the ones from before.

"Device memory" is numpy's, and fresh memory is filled with rubbish.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np

from hvdlite.base.reduction import UFUNCS, accumulator
from hvdlite.transport.reduce import is_integer_mean
from tests.references import integer_mean
from tests.transport.gpu.fake_nccl import FakeCommunicator, FakeNcclError, group_end, group_start

SECONDS = 10.0


class FakeNode:
    """The devices and streams of all ranks, which are threads of one process.

    Attributes:
        executed: what the devices have done, in the order of it.
        communicators: by rank, as they were made last.
        connected: how many have been made.
    """

    def __init__(self):
        self.lock = threading.Condition(threading.RLock())
        self.streams = {}
        self.executed = []
        self.communicators = {}
        self.connected = 0
        self.meetings = {}
        self.kept = []
        self._numbers = itertools.count(1)

    def new_stream(self):
        stream = FakeStream(self, next(self._numbers))
        self.streams[stream.ptr] = stream
        return stream

    def push(self, stream, task):
        with self.lock:
            self.streams[stream].queue.append(task)
            self.lock.notify_all()

    def launch(self, stream, function, name="kernel"):
        """Send any function to a stream, as a framework does with its kernels."""
        self.push(stream.ptr, _Kernel(name, function))

    def synchronize(self, stream):
        """Run everything in a stream, waiting for other ranks that have yet to come."""
        deadline = time.monotonic() + SECONDS
        with self.lock:
            while stream.queue:
                if not self.advance(stream) and not self.lock.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"stream {stream.ptr} hangs in {stream.queue[0].name}")

    def advance(self, stream, visiting=()):
        """Run one task of a stream, or one that its next task needs; tell whether there was."""
        if not stream.queue or stream in visiting:
            return False
        task = stream.queue[0]
        moved = task.run(self, (*visiting, stream))
        if task.complete:
            stream.queue.popleft()
            self.executed.append(task.name)
            self.lock.notify_all()
            return True
        return moved


class FakeStream:
    def __init__(self, node, ptr):
        self.node = node
        self.ptr = ptr
        self.queue = deque()


class _Kernel:
    def __init__(self, name, function):
        self.name = name
        self.function = function
        self.complete = False

    def run(self, node, visiting):
        self.function()
        self.complete = True


class FakeEvent:
    """An event; as a task it is its own record."""

    name = "record"
    error = None  # what the device has failed with

    def __init__(self, node, stream):
        self.node = node
        self.stream = node.streams[stream]
        self.complete = False
        node.push(stream, self)

    def run(self, node, visiting):
        self.complete = True

    @property
    def done(self):
        if self.error is not None:
            raise self.error
        with self.node.lock:
            while not self.complete and self.node.advance(self.stream):
                pass
            return self.complete


class _Wait:
    name = "wait"

    def __init__(self, event):
        self.event = event

    @property
    def complete(self):
        return self.event.complete

    def run(self, node, visiting):
        return not self.complete and node.advance(self.event.stream, visiting)


class FakeCuda:
    """A `hvdlite.transport.gpu.cuda.Cuda` of one rank, without a device.

    Args:
        node: shared by the ranks.
        bus: where this rank's device is.
        version: NCCL's; 0: there is none.
        refuses: why NCCL does not connect.
    """

    def __init__(self, node, bus="0", version=22707, refuses=None):
        self.node = node
        self.nccl = SimpleNamespace(groupStart=group_start, groupEnd=group_end)
        self.pinned_arrays = []
        self._bus = bus
        self._version = version
        self._refuses = refuses
        self.released = threading.Event()
        self._current = threading.local()

    def bus_id(self, device):
        return self._bus

    def nccl_version(self):
        return self._version

    def unique_id(self):
        if self._refuses == "id":
            raise FakeNcclError("no socket interface found")
        return bytes(range(128))

    def communicator(self, size, unique_id, rank):
        assert unique_id == bytes(range(128))
        if self._refuses == "connect":
            raise FakeNcclError("unhandled system error")
        if self._refuses == "hang":
            self.released.wait(SECONDS)
        return FakeCommunicator(self.node, size, rank)

    def stream(self, device):
        return self.node.new_stream()

    @contextlib.contextmanager
    def on(self, device, stream):
        before, self._current.stream = getattr(self._current, "stream", None), stream
        try:
            yield
        finally:
            self._current.stream = before

    def record(self, device, stream):
        return FakeEvent(self.node, stream)

    def wait_event(self, device, stream, event):
        self.node.push(stream, _Wait(event))

    def empty(self, size, dtype):
        return self._rubbish(size * np.dtype(dtype).itemsize).view(dtype)

    def pinned(self, nbytes):
        self.pinned_arrays.append(self._rubbish(nbytes))
        return self.pinned_arrays[-1]

    def pointer(self, array):
        assert array.flags.c_contiguous
        return array.ctypes.data

    def copy(self, target, source):
        assert target.nbytes == source.nbytes
        if source.nbytes:
            to, fro = target.view(np.uint8), source.view(np.uint8)
            self.node.launch(self._current.stream, lambda: np.copyto(to, fro), "copy")

    def reduce(self, rows, result, op, scaling):
        if not result.size:
            return
        dtype = result.dtype
        rows, out = rows.view(dtype).reshape(-1, result.size), result.view(dtype)

        def compute():
            if is_integer_mean(rows.dtype, op, scaling):
                mean = integer_mean(rows.astype(object).sum(axis=0), scaling.divisor)
                out[...] = mean.astype(rows.dtype)
                return
            total = rows[0].astype(accumulator(rows.dtype))
            for row in rows[1:]:
                total = UFUNCS[op](total, row.astype(total.dtype)).astype(total.dtype)
            out[...] = scaling.apply(total).astype(rows.dtype)

        self.node.launch(self._current.stream, compute, "reduce")

    def convert(self, source, target, scaling):
        assert source.size == target.size
        values, out = source.view(source.dtype), target.view(target.dtype)

        def compute():
            wide = values.astype(accumulator(values.dtype))
            out[...] = scaling.apply(wide).astype(accumulator(out.dtype)).astype(out.dtype)

        self.node.launch(self._current.stream, compute, "convert")

    def _rubbish(self, nbytes):
        array = np.full(nbytes, 0xCD, np.uint8)
        self.node.kept.append(array)  # what is freed while the device uses it is not reused
        return array
