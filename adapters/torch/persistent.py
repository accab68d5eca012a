"""Allreduces of tensors in place, which are persistent: repeated calls reuse the operation."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from hvdlite.base import reduction
from hvdlite.base.interrupts import uninterrupted
from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives import describe_allreduce
from hvdlite.engine import Engine, Operation, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.torch.device_memory import device_converter
from hvdlite.torch.handles import TensorHandle, copy_result, mark_written
from hvdlite.torch.tensors import is_plain, to_array


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
    arguments = average, op, prescale, postscale
    try:
        cache = caches[engine]
    except KeyError:
        cache = caches[engine] = OrderedDict()
    known = cache.get(name) if name else None
    if known is not None and known.fits(tensor, arguments):
        return TensorHandle(engine.named.submit(known.operation, begin), mark_written, tensor)
    made: list[Any] = []

    def describe(name: str) -> Operation:
        # Detached: what is kept must not keep the tensor.
        memory = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
        array = to_array(memory, device_converter([tensor], prescale, postscale))
        out = memory_of(tensor, array)
        chosen = reduction.choose(average, op)
        operation = describe_allreduce(array, name, chosen, prescale, postscale, out=out)
        made.extend((operation, out))
        return operation

    handle = engine.submit("allreduce", name, describe, begin)
    operation, out = made
    # With `average`, every call must issue the deprecation warning, so it is not cached.
    if name and average is None and tensor.is_cpu and out is not None:
        keep(cache, engine.settings.cache_capacity, operation, tensor, arguments)
    return TensorHandle(handle, copy_result if out is None else mark_written, tensor)


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
