"""Work and futures of torch.distributed over the handles of lanes."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.collectives.point_to_point import Transfer
from hvdlite.engine import Handle
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import to_tensor_like
from hvdlite.world import world

# What has called C++, where autograd's engine runs.
_run_backward = torch.autograd.graph._engine_run_backward.__code__


class _Failure:
    """A result that raises where C++ looks for tensors in it, as DDP does."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error

    def fail(self) -> None:
        """Raise the error."""
        raise self._error


class Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future that a lane's thread completes; callbacks, which may communicate, run in others."""

    def then(self, callback: Callable[[Any], Any]) -> Future:
        following = Future()

        def run() -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        super().add_done_callback(lambda _: threading.Thread(target=run, daemon=True).start())
        return following

    def set_exception(self, error: Any) -> None:
        """Complete with an error, which C++ sees, too: torch's would give it an empty result."""
        self._set_unwrap_func(_Failure.fail)
        self.set_result(_Failure(error))

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)


def is_in_backward() -> bool:
    """Return whether DDP's reducer makes the call for a gradient; a hook, in Python, may wait."""
    if torch._C._current_autograd_node() is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("hvdlite."):
        frame = frame.f_back
    return frame is not None and frame.f_code is _run_backward


class EndOfBackward:
    """Finishes operations at the end of the backward pass that has submitted them.

    Without cores to spare they would compete with it, and leave together for less. DDP queues its
    own wait for the end after this.
    """

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._task = -1

    def finish(self, handle: Handle) -> None:
        """Wait for an operation at the end of the pass that runs now."""
        self._handles.append(handle)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._run)

    def _run(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            with contextlib.suppress(HorovodInternalError):  # which its owner gets
                handle.wait()


@untraced_methods("wait", "get_future")
class Work(dist.Work):
    """Operations in flight.

    Args:
        group: The group.
        handles: Of the operations.
        tensors: That get the results.
        settle: Writes results that lie elsewhere to the tensors.
        what: The kind of call, for messages.
    """

    def __init__(
        self,
        group: Any,
        handles: Sequence[Handle | Transfer],
        tensors: Sequence[torch.Tensor],
        settle: Callable[[], object] | None = None,
        what: str = "",
    ) -> None:
        super().__init__()
        self.handles, self.tensors = handles, tensors
        self._group, self._settle, self._what = group, settle, what
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the results.

        Args:
            timeout: 0 or less: that of the group.

        Raises:
            HorovodInternalError: The ranks disagree, one has died, or the time is over.
        """
        seconds = timeout.total_seconds()
        for handle in self.handles:
            if isinstance(handle, Transfer):
                handle.wait(seconds if seconds > 0 else self._group.timeout)
            elif seconds > 0 and not handle.ends_within(seconds):
                raise HorovodInternalError(
                    f"rank {world.rank()}: waited {seconds:g} s in {handle.name!r} "
                    f"({self._what}), which other ranks have not called; see what they do, or "
                    "allow more time"
                )
            else:
                handle.wait()
        self._group.check()
        self.settle()
        return True

    def settle(self) -> None:
        """Write results that lie elsewhere to the tensors, once."""
        with self._lock:
            settle, self._settle = self._settle, None
            if settle is not None:
                settle()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operations have ended, with errors perhaps; then results are there."""
        for handle in self.handles:
            if isinstance(handle, Handle) and (driver := handle.driver) is not None:
                driver.take_over()
        if not all(handle.done() for handle in self.handles):
            return False
        if self._settle is not None:
            with contextlib.suppress(HorovodInternalError):  # which `wait` raises again
                self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of operations that have ended; None: there is none."""
        try:
            if self.is_completed():
                self.wait()
        except HorovodInternalError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [*self.tensors]

    def source_rank(self) -> int:
        """Wait for a message, and return the rank in the group that has sent it."""
        self.wait()
        (transfer,) = self.handles
        assert isinstance(transfer, Transfer)
        assert transfer.peer is not None
        return transfer.peer

    _source_rank = source_rank

    def get_future(self) -> Future:
        future = Future()
        left = len(self.handles)

        def end(_: object = None) -> None:
            nonlocal left
            left -= 1
            if left > 0:
                return
            try:
                future.set_result(self.result())
            except Exception as error:
                future.set_exception(error)

        if any(isinstance(handle, Transfer) for handle in self.handles):
            left = 1
            threading.Thread(target=end, daemon=True).start()
            return future
        for handle in self.handles:
            handle.add_done_callback(end)  # type: ignore[union-attr]
        if not self.handles:
            end()
        return future


def write(tensors: Sequence[torch.Tensor], array: Any) -> None:
    """Copy a flat array to tensors, one after the other."""
    sizes = [tensor.numel() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(
            tensors, to_tensor_like(array, tensors[0]).split(sizes), strict=True
        ):
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))
