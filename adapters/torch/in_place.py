"""Collectives whose results go to the memory of the tensors that they are given."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hvdlite import collectives, reduction, runtime
from hvdlite.engine import Operation
from hvdlite.engine.persistent import Persistent
from hvdlite.process_sets import ProcessSet
from hvdlite.reduction import ReduceOp
from hvdlite.torch.device_memory import lender
from hvdlite.torch.handles import TensorHandle, copied, written
from hvdlite.torch.tensors import to_array


class KeptAllreduce:
    """An allreduce of a tensor on the host in place, kept for the next call like it.

    It keeps the tensor's memory, but not the tensor.

    Args:
        operation: which has been submitted once.
        tensor: contiguous.
        arguments: of the call, whatever else they are.
        persistent: where it is kept by the operation's name, until the tensor is gone.
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
        persistent: Persistent[KeptAllreduce],
    ) -> None:
        self.operation = operation
        self._arguments = arguments
        # Weakly, or memory of an engine that has been shut down would wait for the collector.
        keeper, itself, name = weakref.ref(persistent), weakref.ref(self), operation.name
        self._tensor = weakref.ref(tensor, lambda _: _forget(keeper(), name, itself()))
        self._address, self._shape, self._dtype = tensor.data_ptr(), tensor.shape, tensor.dtype

    def fits(self, tensor: torch.Tensor, arguments: Any) -> bool:
        """Whether a call asks for the same; ``.data`` can make another of the same tensor."""
        return (
            self._tensor() is tensor
            and self._address == tensor.data_ptr()
            and self._dtype is tensor.dtype
            and self._shape == tensor.shape
            and self._arguments == arguments
            and _is_plain(tensor)
        )


def allreduce_handle(
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
        begin: whether it should start before somebody waits for it.
    """
    engine = runtime.engine(process_set)
    arguments = average, op, prescale, postscale
    kept = engine.persistent.get(name) if name else None
    if kept is not None and kept.fits(tensor, arguments):
        handle = TensorHandle(kept.operation.name, written, tensor)
        engine.named.submit(kept.operation, begin, handle)
        return handle
    # Before anything can be refused: a refusal must not shift the names of later calls.
    numbered = name or engine.unnamed("allreduce")
    array = to_array(tensor, lender([tensor], prescale, postscale))
    out = memory_of(tensor, array)
    operation = collectives.describe_allreduce(
        array, numbered, reduction.choose(average, op), prescale, postscale, out=out
    )
    handle = TensorHandle(numbered, copied if out is None else written, tensor)
    engine.named.submit(operation, begin, handle)
    # A warning that comes with the argument comes every time.
    in_place = tensor.is_cpu and out is not None
    if name and average is None and in_place:
        persistent = engine.persistent
        persistent.keep(name, KeptAllreduce(operation, tensor, arguments, persistent))
    return handle


def _forget(
    persistent: Persistent[KeptAllreduce] | None, name: str, kept: KeptAllreduce | None
) -> None:
    if persistent is not None and kept is not None:
        persistent.forget(name, kept)


def memory_of(tensor: torch.Tensor, array: Any) -> Any:
    """An array as a place for results, if it is the tensor's own memory; else None."""
    if tensor.is_cpu:
        return array if _is_plain(tensor) else None
    lent = getattr(array, "tensor", None)
    return array if lent is not None and lent.data_ptr() == tensor.data_ptr() else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory holds a tensor's elements, in order: no conjugates or negatives of them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
