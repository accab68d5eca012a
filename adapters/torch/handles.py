"""Handles of collectives on tensors.

Allreduces in place are persistent: repeated calls of the same name reuse the operation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from hvdlite.base.interrupts import uninterrupted
from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives import describe_allreduce
from hvdlite.engine import Engine, Handle, Operation, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.device_memory import device_converter
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import is_plain, to_array, to_tensor_like


@untraced_methods("wait")
class TensorHandle:
    """A collective in flight; `synchronize` turns it into its tensor, once.

    Args:
        convert: Makes the collective's return value of the operation's result and ``tensor``.
        tensor: The tensor that was passed to the collective, or a list of them.
    """

    __slots__ = ("_convert", "_handle", "_tensor")

    def __init__(self, handle: Handle, convert: Callable[[Any, Any], Any], tensor: Any) -> None:
        self._handle = handle
        self._convert: Callable[[Any, Any], Any] | None = convert
        self._tensor: Any = tensor

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self._handle.name

    def done(self) -> bool:
        """Return whether the operation has ended, with a result or an error."""
        return self._handle.finished

    def wait(self) -> Any:
        """Wait for the operation and return the collective's return value.

        If an exception from a signal handler ends the wait, the handle can be waited for again.

        Raises:
            ValueError: The handle has been waited for before.
            HorovodInternalError: The operation failed.
        """
        convert, tensor = self._convert, self._tensor
        if convert is None:
            raise ValueError(f"the handle of {self.name!r} has been synchronized before")
        try:
            result = self._handle.wait()
        except HorovodInternalError:
            self._convert = self._tensor = None
            raise
        self._convert = self._tensor = None
        return convert(result, tensor)


def submit(
    kind: str,
    name: str | None,
    describe: Callable[[str], Operation],
    convert: Callable[[Any, Any], Any],
    tensor: Any,
    process_set: ProcessSet,
) -> TensorHandle:
    """Submit an operation on tensors and return its handle; see `Engine.submit`, `TensorHandle`."""
    handle = runtime.engine(process_set).submit(kind, name, describe)
    return TensorHandle(handle, convert, tensor)


def poll(handle: TensorHandle) -> bool:
    """Return whether ``synchronize(handle)`` would return at once."""
    return _checked(handle).done()


def synchronize(handle: TensorHandle) -> Any:
    """Wait for an asynchronous operation, and return its result: a tensor, or as it says.

    Raises:
        ValueError: It is not a handle, or has been synchronized before.
        HorovodInternalError: The operation failed, on this rank or another.
    """
    return _checked(handle).wait()


def _checked(handle: TensorHandle) -> TensorHandle:
    if not isinstance(handle, TensorHandle):
        raise ValueError(f"{handle!r} is not a handle; pass what an ..._async function returned")
    return handle


def in_place(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a result, which is copied unless it is in the tensor's memory."""
    found = to_tensor_like(result, tensor)
    if found.data_ptr() == tensor.data_ptr():
        return mark_written(result, tensor)
    with torch.no_grad():
        return tensor.copy_(found)


def mark_written(_: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Tell torch that a result has been written to the memory of a tensor; return the tensor."""
    # torch did not see the write: views and saved tensors must know of it.
    torch.autograd.graph.increment_version(tensor)
    return tensor


# Persistent operations


@dataclass(frozen=True)
class PersistentAllreduce:
    """An allreduce of a host tensor in place, kept for the next call with the same arguments.

    It keeps the tensor's memory, but not the tensor. ``.data`` can give a tensor other memory.
    """

    operation: Operation
    tensor: weakref.ref[torch.Tensor]
    call: tuple[Any, ...]  # the tensor's address, dtype and shape, and the arguments

    def fits(self, tensor: torch.Tensor, arguments: Any) -> bool:
        """Return whether a call is the same."""
        call = tensor.data_ptr(), tensor.dtype, tensor.shape, arguments
        return self.tensor() is tensor and self.call == call and is_plain(tensor)


Cache: TypeAlias = "OrderedDict[str, PersistentAllreduce]"  # by name, the oldest first

#: The operations of each world. To describe one takes longer than to submit it.
caches: WeakKeyDictionary[Engine, Cache] = WeakKeyDictionary()


def allreduce_in_place(
    tensor: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: ReduceOp | int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    begin: bool = True,
) -> TensorHandle:
    """Start to reduce a tensor in place; arguments and errors as ``allreduce_``.

    Args:
        begin: Whether it starts before somebody waits for it.
    """
    engine = runtime.engine(process_set)
    factors = prescale, postscale
    arguments = average, op, *factors
    try:
        cache = caches[engine]
    except KeyError:
        cache = caches[engine] = OrderedDict()
    known = cache.get(name) if name else None
    if known is not None and known.fits(tensor, arguments):
        return TensorHandle(engine.named.submit(known.operation, begin), mark_written, tensor)
    made: list[Operation] = []

    def describe(name: str) -> Operation:
        # Detached: what is kept must not keep the tensor.
        memory = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
        array = to_array(memory, device_converter([tensor], *factors))
        out = memory_of(tensor, array)
        made.append(describe_allreduce(array, name, op, *factors, out=out, average=average))
        return made[0]

    handle = engine.submit("allreduce", name, describe, begin)
    # With `average`, every call must issue the deprecation warning, so it is not cached.
    if name and average is None and tensor.is_cpu and is_plain(tensor):
        keep(cache, engine.settings.cache_capacity, made[0], tensor, arguments)
    return TensorHandle(handle, in_place, tensor)


@uninterrupted  # until the wait for the operation, which follows
def keep(
    cache: Cache, capacity: int, operation: Operation, tensor: torch.Tensor, arguments: Any
) -> None:
    """Add an operation to a cache, until its tensor is gone or the cache is full of newer ones."""
    name = operation.name
    # Weak, so that a closed engine's memory is freed before the garbage collector runs.
    of_tensor = weakref.ref(tensor, partial(_remove, weakref.ref(cache), name))
    cache.pop(name, None)
    call = tensor.data_ptr(), tensor.dtype, tensor.shape, arguments
    cache[name] = PersistentAllreduce(operation, of_tensor, call)
    with contextlib.suppress(KeyError):  # other threads may have emptied it
        while len(cache) > capacity:
            cache.popitem(last=False)


def _remove(reference: weakref.ref[Cache], name: str, of_tensor: weakref.ref[torch.Tensor]) -> None:
    """Remove the operation of a tensor; the garbage collector may call this at any time."""
    cache = reference()
    known = None if cache is None else cache.get(name)
    if cache is not None and known is not None and known.tensor is of_tensor:
        cache.pop(name, None)


def memory_of(tensor: torch.Tensor, array: Any) -> Any:
    """Return the array as a place for results, if it is the tensor's own memory; else None."""
    if tensor.is_cpu:
        return array if is_plain(tensor) else None
    shared = getattr(array, "tensor", None)
    return array if shared is not None and shared.data_ptr() == tensor.data_ptr() else None
