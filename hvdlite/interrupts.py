"""Signal handlers that wait while the main thread must not be interrupted.

Python runs a handler in the main thread between any two bytecodes, also while that thread runs a
round of a lane, and an exception from there would leave the round half done. Python has no way to
block handlers. So every handler gets a `_Handler` around it, which looks at the stack: inside a
function that is marked as `uninterrupted` the signal is only noted. Its handler runs as soon as
the main thread has left that function, or a wait in it, which raises `Interrupted`. For this a call
pays no more than a look at `deferred`, which is nearly always empty.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeVar

from hvdlite.errors import HorovodInternalError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")

#: The signals whose handlers wait, and since when.
deferred: dict[int, float] = {}
# An exchange of data ends soon, since all ranks are there. If it does not, because a peer was
# stopped, handlers run all the same after so many seconds; one that raises ends communication.
_LONGEST_SECONDS = 5.0

# What is uninterrupted, and whether it is resumable.
_codes: dict[CodeType, bool] = {}
_raised: list[BaseException] = []  # by handlers that could wait no longer
# By way of which `signal.signal` and `signal.getsignal` set and get handlers, whenever they were
# imported.
_signal = importlib.import_module("_signal")
_set, _get = _signal.signal, _signal.getsignal


class Interrupted(BaseException):
    """A wait has ended early, so that a signal's handler can run; it can be taken up again."""


class Worker(Protocol):
    """Something that may have to go on with what an exception has abandoned."""

    def take_over(self) -> None:
        """See to it that nothing stays undone which the main thread has begun."""


#: Told when a handler has raised: nobody may wait for what the main thread has submitted.
workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def uninterrupted(function: _Function) -> _Function:
    """Mark a function as one during which no handler runs, and in which waits go on to their end.

    Its caller calls `leave` afterwards, in any case and without being marked itself.
    """
    assert isinstance(function, FunctionType)
    _codes[function.__code__] = False
    return function


def resumable(function: _Function) -> _Function:
    """Mark a function as one during which no handler runs, and which is left in a wait.

    `Interrupted` passes through it then; called again, it goes on. Its caller is `call`.
    """
    _codes[uninterrupted(function).__code__] = True
    return function


def call(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a `resumable` function, again after each wait in it that handlers have ended.

    Raises:
        BaseException: what it or a handler raises. After the latter, it may be called again.
    """
    while True:
        try:
            return function(*arguments)
        except Interrupted:
            continue
        finally:
            if deferred:
                leave()


def run_deferred() -> bool:
    """Run the handlers for which a wait of the main thread is to end, if this is that thread.

    Returns:
        Whether any has run.

    Raises:
        Interrupted: a caller, which is `resumable`, has to be left first.
        BaseException: whatever a handler raises. Those after it run when this is called next.
    """
    if not is_due():
        return False
    inside = _find_inside(sys._getframe(1))
    if inside is not None:
        if _codes[inside]:
            raise Interrupted
        return False
    _run_all()
    return True


def leave() -> None:
    """Run the handlers that have waited, unless a caller is uninterrupted: then its caller does."""
    if is_due() and _find_inside(sys._getframe(1)) is None:
        _run_all()


def is_from_handler(error: BaseException) -> bool:
    """Return whether a handler, and not the call itself, has raised the exception at hand."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _call.__code__:
            return True
        trace = trace.tb_next
    return False


def is_due() -> bool:
    """Return whether handlers wait for this thread."""
    return bool(deferred) and threading.get_ident() == threading.main_thread().ident


def run_overdue() -> None:
    """Run the handlers that have waited too long for an exchange of data to end, in its midst.

    Raises:
        HorovodInternalError: a handler has raised; `run_deferred` will raise the same.
    """
    since = min(deferred.values(), default=0.0)
    if not is_due() or time.monotonic() - since < _LONGEST_SECONDS:
        return
    try:
        _run_all()
    except BaseException as error:
        _raised.append(error)
        deferred[0] = since
        raise HorovodInternalError(
            f"a signal's handler raised {type(error).__name__} while an exchange of data did not "
            f"end within {_LONGEST_SECONDS:.0f} s; a rank has been stopped or hangs"
        ) from error


def install() -> None:
    """Put all handlers of this process behind a `_Handler`, now and later, until `uninstall`.

    ``signal.getsignal`` goes on to return what was given to ``signal.signal``. In another thread
    than the main one, which may set no handlers, this is about later ones only.
    """
    vars(_signal).update(signal=_wrapping_signal, getsignal=_unwrapping_getsignal)
    _exchange_handlers(_wrapped)


def uninstall() -> None:
    """Undo `install`, in the main thread."""
    if _exchange_handlers(_unwrapped):
        vars(_signal).update(signal=_set, getsignal=_get)


def _note_fork() -> None:
    """In a forked child: leave to its parent what that has begun, with locks that stay taken."""
    deferred.clear()
    workers.clear()


os.register_at_fork(after_in_child=_note_fork)


class _Handler:
    """A handler of the user's, called at once or later.

    Args:
        handler: which takes the signal's number and the frame that it has interrupted.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _find_inside(frame) is not None:
            deferred.setdefault(number, time.monotonic())
        else:
            _call(self.handler, number, frame)


def _find_inside(frame: FrameType | None) -> CodeType | None:
    """The innermost function on a stack that is uninterrupted."""
    while frame is not None:
        if frame.f_code in _codes:
            return frame.f_code
        frame = frame.f_back
    return None


def _run_all() -> None:
    while deferred:
        number = next(iter(deferred))
        del deferred[number]
        if not number:
            raise _raised.pop()
        handler = _unwrapped(_get(number))
        if callable(handler):  # else it has been taken away meanwhile
            _call(handler, number, sys._getframe(1))


def _call(handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    except BaseException:
        for worker in list(workers):
            worker.take_over()
        raise


def _wrapping_signal(number: int, handler: Any, /) -> Any:
    return _unwrapped(_set(number, _wrapped(handler)))


def _unwrapping_getsignal(number: int, /) -> Any:
    return _unwrapped(_get(number))


def _wrapped(handler: Any) -> Any:
    return _Handler(handler) if callable(handler) and not isinstance(handler, _Handler) else handler


def _unwrapped(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Handler) else handler


def _exchange_handlers(change: Callable[[Any], Any]) -> bool:
    """Change all handlers that are Python's; return whether this thread may do so."""
    if threading.current_thread() is not threading.main_thread():
        return False
    for number in signal.valid_signals():
        handler = _get(number)
        if change(handler) is not handler:
            _set(number, change(handler))
    return True
