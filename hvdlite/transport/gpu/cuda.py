"""A thin layer over cupy, which is loaded lazily, for the device transports.

Streams are identified by their addresses, as in torch's ``stream.cuda_stream``; 0 is the default
stream. Device arrays are flat and contiguous: cupy's, or `hvdlite.transport.gpu.base.FlatArray` of
elements that cupy has no type for. Work goes to the stream that `Cuda.on` has
made current in the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport.gpu import kernels

# Earlier ones have neither bfloat16 nor the average.
_OLDEST_NCCL = 21000
# Earlier ones pass the number of elements of a broadcast to NCCL in 32 bits.
_OLDEST_CUPY = (13, 4)
_NOT_READY = 600  # cudaErrorNotReady


class Event:
    """A point in the work of a stream, recorded by `Cuda.record`.

    It is cupy's, whose own ``done`` treats every error as "not yet".
    """

    def __init__(self, runtime: Any, event: Any) -> None:
        self._runtime = runtime
        self._event = event  # destroyed with the last reference
        self.ptr = event.ptr

    @property
    def done(self) -> bool:
        """Return whether the device has reached it.

        Raises:
            CUDARuntimeError: an earlier kernel or copy has failed.
        """
        status = self._runtime.eventQuery(self.ptr)
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)


class Cuda:
    """The devices of this process.

    Raises:
        ImportError: cupy is not installed, or is older than 13.4.
    """

    def __init__(self) -> None:
        self._cupy = import_module("cupy")
        _check_version(self._cupy.__version__)
        self._runtime = self._cupy.cuda.runtime
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nccl = import_module("cupy.cuda.nccl")
        #: None where cupy does not find the library.
        self.nccl: Any = nccl if nccl.available else None

    def device_count(self) -> int:
        """Return the number of devices that this process sees; 0 without a driver."""
        try:
            return int(self._runtime.getDeviceCount())
        except self._runtime.CUDARuntimeError:
            return 0

    def bus_id(self, device: int) -> str:
        """Return the device's address on the PCI bus, unique within a host."""
        return str(self._runtime.deviceGetPCIBusId(device))

    def is_rocm(self) -> bool:
        """Return whether cupy was built for AMD's devices."""
        return bool(self._runtime.is_hip)

    def nccl_version(self) -> int:
        """Return NCCL's version code, e.g. 22707; 0 without a version that can be used."""
        version = 0 if self.nccl is None else int(self.nccl.get_version())
        return version if version >= _OLDEST_NCCL else 0

    def unique_id(self) -> bytes:
        """Create the id by which the ranks of a communicator find each other."""
        made = self.nccl.get_unique_id()
        # Bytes from cupy 14 on, signed integers before.
        return made if isinstance(made, bytes) else bytes(value & 0xFF for value in made)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Join a communicator on the current device; collective."""
        try:
            return self.nccl.NcclCommunicator(size, unique_id, rank)
        except TypeError:
            signed = tuple(np.frombuffer(unique_id, np.int8).tolist())
            return self.nccl.NcclCommunicator(size, signed, rank)

    def stream(self, device: int) -> Any:
        """Create a stream that does not wait for the default stream; ``ptr`` is its address."""
        with self._cupy.cuda.Device(device):
            return self._cupy.cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def on(self, device: int, stream: Any) -> Iterator[None]:
        """Send this thread's work to a stream in this context."""
        with self._cupy.cuda.Device(device), stream:
            yield

    def record(self, device: int, stream: int) -> Event:
        """Record an event after all work that a stream has been given so far."""
        with self._cupy.cuda.Device(device):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        return Event(self._runtime, event)

    def wait_event(self, device: int, stream: int, event: Any) -> None:
        """Make a stream's later work wait for an event; the host does not wait."""
        with self._cupy.cuda.Device(device):
            self._runtime.streamWaitEvent(stream, event.ptr, 0)

    def empty(self, size: int, dtype: np.dtype[Any]) -> Any:
        """Return a device array from cupy's pool, which reuses memory on the same stream."""
        return self._cupy.empty(size, dtype)

    def pinned(self, nbytes: int) -> Any:
        """Return a numpy array of bytes in pinned host memory."""
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def view(self, device: int, pointer: int, size: int, dtype: np.dtype[Any], owner: Any) -> Any:
        """View a framework's device memory as a flat array; nothing is copied or awaited.

        Args:
            owner: kept alive as long as the array.
        """
        memory = self._cupy.cuda.UnownedMemory(pointer, size * dtype.itemsize, owner, device)
        return self._cupy.ndarray(size, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def pointer(self, array: Any) -> int:
        """Return the address of an array on the device or the host."""
        return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

    def copy(self, target: Any, source: Any) -> None:
        """Copy bytes between device arrays, or between one and a pinned array."""
        if source.nbytes:
            self._runtime.memcpyAsync(
                self.pointer(target),
                self.pointer(source),
                source.nbytes,
                self._runtime.memcpyDefault,
                self._cupy.cuda.get_current_stream().ptr,
            )

    def reduce(self, rows: Any, result: Any, op: ReduceOp, scaling: Scaling) -> None:
        """Reduce the rows that lie one after the other in ``rows`` into ``result``.

        16-bit floats are reduced and scaled in float32. A single row is only scaled; it may be
        ``result`` itself.

        Args:
            rows: a multiple of ``result``'s elements.
            op: SUM, MIN, MAX or PRODUCT; SUM alone for complex numbers.
        """
        if not result.size:
            return
        stored, element = _stored_as(result.dtype)
        rows, result = rows.view(stored), result.view(stored)
        inputs = "raw T rows, int64 count, int64 stride, float64 factor, int64 divisor"
        reduce = self._compile("reduce", inputs, kernels.body(element, op, scaling))
        count = rows.size // result.size
        reduce(rows, count, result.size, scaling.factor, scaling.divisor, result)

    def convert(self, source: Any, target: Any, scaling: Scaling) -> None:
        """Scale floats, and round them to another type of float."""
        if not target.size:
            return
        dtypes = source.dtype, target.dtype
        values, out = (each.view(_stored_as(each.dtype)[0]) for each in (source, target))
        inputs = "S source, float64 factor, int64 divisor"
        convert = self._compile("convert", inputs, kernels.conversion(*dtypes, scaling))
        convert(values, scaling.factor, scaling.divisor, out)

    @functools.cache  # noqa: B019 - one object for the life of a transport
    def _compile(self, name: str, inputs: str, code: str) -> Any:
        return self._cupy.ElementwiseKernel(
            inputs, "T out", code, f"hvdlite_{name}", preamble=kernels.PREAMBLE, no_return=True
        )


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of arrays that hold elements of a dtype: uint16 for bfloat16."""
    return np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype


def _stored_as(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype of a kernel's arrays, and the dtype of their elements."""
    if dtype.kind == "b":
        return np.dtype(np.uint8), dtype
    if dtype.kind == "c":
        part = np.dtype(f"float{4 * dtype.itemsize}")
        return part, part
    return stored_as(dtype), dtype


def _check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _OLDEST_CUPY:
        raise ImportError(
            f"cupy {version} is older than 13.4, whose broadcast counts elements in 64 bits; "
            "upgrade it (pip install 'hvdlite[cuda13]', or [cuda12])"
        )
