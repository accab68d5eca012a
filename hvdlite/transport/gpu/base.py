"""The interface of a transport of device arrays, and what all of them have in common."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdlite.base.arrays import as_bytes
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.errors import HorovodInternalError
from hvdlite.transport.gpu.cuda import Cuda, Event, stored_as
from hvdlite.transport.transport import OnWait, Transport

_SPIN_SECONDS = 100e-6
_MAX_SLEEP = 1e-3


class FlatArray:
    """A flat array of cupy's, and the dtype of its elements: cupy has uint16 for bfloat16."""

    def __init__(self, array: Any, dtype: np.dtype[Any]) -> None:
        self._array = array
        self.dtype = dtype
        self.size, self.itemsize, self.nbytes = array.size, dtype.itemsize, array.nbytes

    def __getitem__(self, part: slice) -> FlatArray:
        return FlatArray(self._array[part], self.dtype)

    def view(self, dtype: Any) -> Any:
        """View the memory as an array of cupy's."""
        return self._array.view(dtype)


class Work:
    """Work that `DeviceTransport.enqueue` has sent to the device."""

    def __init__(self, transport: DeviceTransport, event: Event) -> None:
        self._transport = transport
        self._event = event

    def wait_on(self, stream: int) -> None:
        """Make a stream's later work wait for this; the host does not wait."""
        self._transport.hold(stream, self._event)

    def done(self) -> bool:
        """Return whether the device has finished it.

        Raises:
            HorovodInternalError: the communication, or the device, has failed.
        """
        try:
            finished = self._event.done
        except Exception as error:  # an error of CUDA, from which no later call recovers
            self._transport.abort(f"{type(error).__name__}: {error}")
        # Last: an abort ends the work, too, and leaves garbage in its results.
        self._transport.check()
        return finished

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host until the device has finished it.

        Args:
            timeout: seconds; None: the transport's.

        Raises:
            HorovodInternalError: the communication has failed, or it took too long. The
                transport is aborted then.
        """
        limit = self._transport.timeout if timeout is None else timeout
        start = time.monotonic()
        while not self.done():
            elapsed = time.monotonic() - start
            if limit is not None and elapsed > limit:
                self._transport.abort(
                    f"nothing came for {elapsed:.1f} s; a rank has ended, hangs, or runs "
                    "different steps"
                )
            time.sleep(0 if elapsed < _SPIN_SECONDS else min(elapsed / 8, _MAX_SLEEP))


class DeviceTransport(Transport):
    """The collectives of one communicator on flat contiguous arrays of one device.

    The lane uses it beside its host transport, over which the ranks meet and send messages. All
    data methods send work to the transport's own stream and may be called only in the function that
    `enqueue` runs. In there that stream is cupy's current one, so arithmetic on cupy arrays runs in
    order with the collectives.

    Events alone determine the order of work::

        ready = transport.record(stream)  # where the data are made, by the thread that does it
        work = transport.enqueue(lambda: transport.allreduce(...), [ready])  # the lane's thread
        work.wait_on(stream)  # where the results are used

    None of the three makes the host wait for the device. The arrays must stay alive, and unused by
    other streams, until the work is done.

    Arrays are cupy's, or `FlatArray`.

    After a failure every call raises. Work that the device still does then gives garbage: a caller
    that has used results without `Work.wait` has to restore whatever it computed from them.

    Args:
        timeout: seconds after which work that the host waits for has failed; None: never.

    Attributes:
        stream: its own stream, on which it works; ``ptr`` is its address.
        report: called once, when the communication has failed.
    """

    report: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        cuda: Cuda,
        control: Transport,
        device: int,
        timeout: float | None = None,
    ) -> None:
        self.rank, self.size, self.members = control.rank, control.size, control.members
        self.timeout = timeout
        self._cuda = cuda
        self._control = control
        self._device = device
        self.stream = cuda.stream(device)
        self._failure: str | None = None
        self._entered: int | None = None

    def record(self, stream: int) -> Event:
        """Record an event after all work that a stream has been given so far; not collective."""
        return self._cuda.record(self._device, stream)

    def hold(self, stream: int, event: Event) -> None:
        """Make a stream's later work wait for an event; not collective."""
        self._cuda.wait_event(self._device, stream, event)

    def enqueue(self, exchange: Callable[[], None], after: Iterable[Event] = ()) -> Work:
        """Run a function that calls data methods, and return its work on the device.

        Args:
            exchange: called with the transport's stream as the current one.
            after: events that the device waits for first.

        Raises:
            HorovodInternalError: the communication has failed.
        """
        self.check()
        with self._cuda.on(self._device, self.stream):
            for event in after:
                self.hold(self.stream.ptr, event)
            self._entered = threading.get_ident()
            try:
                exchange()
            finally:
                self._entered = None
            return Work(self, self.record(self.stream.ptr))

    def check(self) -> None:
        """Raise HorovodInternalError if the communication has failed; any thread may call this.

        The message names the reason, the rank and the device.
        """
        if self._failure is not None:
            raise HorovodInternalError(self._failure)

    def abort(self, reason: str) -> None:
        """End the communication, including work in flight; any thread may call this.

        `report` has the lane call `Transport.leave` on its host transport, so that the other ranks
        learn of it, whichever thread has found the failure.

        Raises:
            HorovodInternalError: always, with the reason of the first call.
        """
        if self._failure is None:
            self._failure = (
                f"rank {self.members[self.rank]}: the exchange on device {self._device} failed: "
                f"{reason}; end the job, or restore the last state that all ranks have and start "
                "anew"
            )
            self._disconnect()
            self.report()
        self.check()

    def meet(self, digests: Sequence[bytes], on_wait: OnWait, data: Sequence[Any] = ()) -> int:
        return self._control.meet(digests, on_wait)

    def leave(self) -> None:
        self._control.leave()

    def gather(self, message: bytes) -> list[bytes]:
        return self._control.gather(message)

    def empty(self, size: int, dtype: np.dtype[Any]) -> FlatArray:
        self._check_entered()
        return FlatArray(self._cuda.empty(size, stored_as(dtype)), dtype)

    def scratch(self, size: int, dtype: np.dtype[Any], exchanged: bool = False) -> FlatArray:
        return self.empty(size, dtype)

    def copy(self, source: Any, target: Any) -> None:
        self._check_entered()
        self._cuda.copy(target, source)

    def scale(self, source: Any, target: Any, scaling: Scaling) -> None:
        self._check_entered()
        self._cuda.reduce(source, target, ReduceOp.SUM, scaling)

    def convert(self, source: Any, target: Any, scaling: Scaling) -> None:
        self._check_entered()
        self._cuda.convert(source, target, scaling)

    def reducescatter(
        self, pieces: Sequence[Any], result: Any, op: ReduceOp, scaling: Scaling
    ) -> None:
        """Reduce all ranks' ``pieces[r]`` on rank r, in the order of the ranks."""
        rows = self.empty(self.size * result.size, result.dtype)
        self.alltoall([as_bytes(piece) for piece in pieces], equal_parts(as_bytes(rows), self.size))
        self._cuda.reduce(rows, result, op, scaling)

    def _check_entered(self) -> None:
        """Raise if the work of a call would not be in order with the rest."""
        if self._entered != threading.get_ident():
            raise RuntimeError(
                "a collective on device arrays was called outside of enqueue(); pass a function "
                "that calls it to enqueue()"
            )

    @abstractmethod
    def _disconnect(self) -> None:
        """End work on the device that waits for other ranks."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the transport, unless it has been aborted; collective."""


def equal_parts(array: Any, count: int) -> list[Any]:
    """Cut an array into parts of the same size; the remainder is in none of them."""
    step = array.size // count
    return [array[number * step : (number + 1) * step] for number in range(count)]
