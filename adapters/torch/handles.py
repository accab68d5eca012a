"""Handles of collectives on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdlite.engine import Handle, Operation, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import on_current_stream, to_tensor_like


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


def copy_result(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a result that lies elsewhere to the tensor, and return the tensor."""
    with torch.no_grad():
        return tensor.copy_(to_tensor_like(result, tensor))


def mark_written(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Tell torch that a result has been written to the memory of a tensor; return the tensor."""
    if not tensor.is_cpu:
        on_current_stream(result)
    # torch did not see the write: views and saved tensors must know of it.
    torch.autograd.graph.increment_version(tensor)
    return tensor
