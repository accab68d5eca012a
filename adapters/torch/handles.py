"""Collectives on tensors that are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdlite.engine import Handle
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import taken, to_tensor_like


@untraced_methods("wait")
class TensorHandle(Handle):
    """A collective on its way; `synchronize` turns it into its tensor, once.

    Args:
        name: the operation's.
        convert: makes what the collective returns of the result and ``tensor``.
        tensor: what was passed to the collective: a tensor or a list of them.
    """

    __slots__ = ("_convert", "_tensor")

    def __init__(
        self,
        name: str,
        convert: Callable[[Any, Any], Any],
        tensor: Any,
    ) -> None:
        Handle.__init__(self, name)
        self._convert: Callable[[Any, Any], Any] | None = convert
        self._tensor: Any = tensor

    def wait(self) -> Any:
        """Wait for the operation and return what it results in.

        If an exception from a signal's handler ends the wait, the handle can be waited for again.

        Raises:
            ValueError: the handle has been waited for before.
            HorovodInternalError: the operation failed.
        """
        convert, tensor = self._convert, self._tensor
        if convert is None:
            raise ValueError(f"the handle of {self.name!r} has been synchronized before")
        try:
            result = Handle.wait(self)
        except HorovodInternalError:
            self._convert = self._tensor = None
            raise
        self._convert = self._tensor = None
        return convert(result, tensor)


def poll(handle: TensorHandle) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return _checked(handle).done()


def synchronize(handle: TensorHandle) -> Any:
    """Wait for an asynchronous operation, and return its result: a tensor, or as it says.

    Raises:
        ValueError: it is not a handle, or has been synchronized before.
        HorovodInternalError: the operation failed, on this rank or another.
    """
    return _checked(handle).wait()


def _checked(handle: TensorHandle) -> TensorHandle:
    if not isinstance(handle, TensorHandle):
        raise ValueError(f"{handle!r} is not a handle; pass what an ..._async function returned")
    return handle


def copied(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which takes over a result that lies elsewhere."""
    with torch.no_grad():
        return tensor.copy_(to_tensor_like(result, tensor))


def written(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory a result has been written to."""
    if not tensor.is_cpu:
        taken(result)
    # torch did not see the write: views and saved tensors must know of it.
    torch.autograd.graph.increment_version(tensor)
    return tensor
