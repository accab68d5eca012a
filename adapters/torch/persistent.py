"""Allreduces of tensors in place, which are persistent: repeated calls reuse the operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hvdlite import reduction, runtime
from hvdlite.collectives import describe_allreduce
from hvdlite.engine import Operation
from hvdlite.engine.persistent import PersistentCache
from hvdlite.process_sets import ProcessSet
from hvdlite.reduction import ReduceOp
from hvdlite.torch.device_memory import device_converter
from hvdlite.torch.handles import TensorHandle, copied, written
from hvdlite.torch.tensors import to_array


class PersistentAllreduce:
    """An allreduce of a host tensor in place, kept for the next call with the same arguments.

    It keeps the tensor's memory, but not the tensor.

    Args:
        operation: Operation that has been submitted once.
        tensor: Contiguous tensor.
        arguments: The call's other arguments.
        cache: Cache that holds it by the operation's name, until the tensor is gone.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_arguments",
        "_dtype",
        "_shape",
        "_tensor",
        "operation",
    )

    def __init__(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        arguments: Any,
        cache: PersistentCache[PersistentAllreduce],
    ) -> None:
        self.operation = operation
        self._arguments = arguments
        # Weak, so that a closed engine's memory is freed before the garbage collector runs.
        weak_cache, itself, name = weakref.ref(cache), weakref.ref(self), operation.name
        self._tensor = weakref.ref(tensor, lambda _: _remove(weak_cache(), name, itself()))
        self._address, self._shape, self._dtype = tensor.data_ptr(), tensor.shape, tensor.dtype

    def fits(self, tensor: torch.Tensor, arguments: Any) -> bool:
        """Return whether a call is the same; ``.data`` can give a tensor other memory."""
        return (
            self._tensor() is tensor
            and self._address == tensor.data_ptr()
            and self._dtype is tensor.dtype
            and self._shape == tensor.shape
            and self._arguments == arguments
            and _is_plain(tensor)
        )


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
    known = engine.persistent.get(name) if name else None
    if known is not None and known.fits(tensor, arguments):
        return TensorHandle(engine.named.submit(known.operation, begin), written, tensor)
    made: list[Any] = []

    def describe(name: str) -> Operation:
        array = to_array(tensor, device_converter([tensor], prescale, postscale))
        out = memory_of(tensor, array)
        chosen = reduction.choose(average, op)
        operation = describe_allreduce(array, name, chosen, prescale, postscale, out=out)
        made.extend((operation, out))
        return operation

    handle = engine.submit("allreduce", name, describe, begin)
    operation, out = made
    # With `average`, every call must issue the deprecation warning, so it is not cached.
    if name and average is None and tensor.is_cpu and out is not None:
        cache = engine.persistent
        cache.put(name, PersistentAllreduce(operation, tensor, arguments, cache))
    return TensorHandle(handle, copied if out is None else written, tensor)


def _remove(
    cache: PersistentCache[PersistentAllreduce] | None,
    name: str,
    entry: PersistentAllreduce | None,
) -> None:
    if cache is not None and entry is not None:
        cache.remove(name, entry)


def memory_of(tensor: torch.Tensor, array: Any) -> Any:
    """Return the array as a place for results, if it is the tensor's own memory; else None."""
    if tensor.is_cpu:
        return array if _is_plain(tensor) else None
    shared = getattr(array, "tensor", None)
    return array if shared is not None and shared.data_ptr() == tensor.data_ptr() else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether memory holds a tensor's elements, in order: no conjugates or negatives."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
