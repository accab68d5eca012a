"""Deferred signal handlers: they wait while the main thread must not be interrupted.

Python runs a handler in the main thread between any two bytecodes, also while that thread runs a
round of a lane, and an exception from there would leave the round half done. To block signals does
not help: a handler whose signal came before still runs. So every handler gets a `_Handler` around
it, which looks at the stack: inside a function that is marked as `uninterrupted` the signal is only
noted. Its handler runs as soon as the main thread has left that function, or a wait in it, which
raises `Interrupted`. The cost for a call is one check of `deferred`, which is nearly always empty.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from hvdlite.errors import HorovodInternalError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")

#: The signals whose handlers wait, with the time of their arrival.
deferred: dict[int, float] = {}
# An exchange of data ends soon, since all ranks take part. If it does not, because a peer was
# stopped, handlers run after so many seconds nevertheless; one that raises ends communication.
_MAX_SECONDS = 5.0

# The uninterrupted functions; True: the function is resumable.
_codes: dict[CodeType, bool] = {}
_raised: list[BaseException] = []  # by overdue handlers
# By way of which `signal.signal` and `signal.getsignal` set and get handlers, whenever they were
# imported.
_signal = importlib.import_module("_signal")
_set, _get = _signal.signal, _signal.getsignal


class Interrupted(BaseException):
    """A wait has ended early so that a signal's handler can run; the wait can be resumed."""


#: The lanes, whose `take_over` is called when a handler has raised: nobody may be waiting for the
#: main thread's submissions.
workers: weakref.WeakSet[Any] = weakref.WeakSet()


def uninterrupted(function: _Function) -> _Function:
    """Mark a function: no handler runs during it, and its waits are not interrupted.

    Its caller, which is not marked itself, always calls `leave` afterwards.
    """
    assert isinstance(function, FunctionType)
    _codes[function.__code__] = False
    return function


def resumable(function: _Function) -> _Function:
    """Mark a function: no handler runs during it, but a wait in it may be interrupted.

    `Interrupted` then passes through it; when `call`, its caller, calls it again, it continues.
    """
    _codes[uninterrupted(function).__code__] = True
    return function


def call(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a `resumable` function, again after each wait that handlers have interrupted.

    Raises:
        BaseException: any exception of the function or of a handler. After that of a handler it
            may be called again.
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
    """Run the deferred handlers, if this is the main thread; return whether any has run.

    Raises:
        Interrupted: a caller, which is `resumable`, has to be left first.
        BaseException: any exception of a handler. The remaining ones run in the next call.
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
    """Run the deferred handlers, unless a caller is uninterrupted: then its caller runs them."""
    if is_due() and _find_inside(sys._getframe(1)) is None:
        _run_all()


def is_from_handler(error: BaseException) -> bool:
    """Return whether a signal's handler has raised an exception."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is _call.__code__ for frame, _ in frames)


def is_due() -> bool:
    """Return whether handlers wait for this thread."""
    return bool(deferred) and threading.get_ident() == threading.main_thread().ident


def run_overdue() -> None:
    """Run the handlers that have waited too long for the end of an exchange of data.

    Raises:
        HorovodInternalError: a handler has raised; `run_deferred` will raise the same.
    """
    since = min(deferred.values(), default=0.0)
    if not is_due() or time.monotonic() - since < _MAX_SECONDS:
        return
    try:
        _run_all()
    except BaseException as error:
        _raised.append(error)
        deferred[0] = since
        raise HorovodInternalError(
            f"a signal's handler raised {type(error).__name__} while an exchange of data did not "
            f"end within {_MAX_SECONDS:.0f} s; a rank has been stopped or hangs"
        ) from error


def install() -> None:
    """Wrap all signal handlers of this process in a `_Handler`, now and later, until `uninstall`.

    ``signal.getsignal`` still returns the handler that ``signal.signal`` was given. Only the main
    thread may set handlers; called in another thread, this affects later handlers only.
    """
    vars(_signal).update(signal=_wrapping_signal, getsignal=_unwrapping_getsignal)
    _exchange_handlers(_wrapped)


def uninstall() -> None:
    """Undo `install`, in the main thread."""
    if _exchange_handlers(_unwrapped):
        vars(_signal).update(signal=_set, getsignal=_get)


def _note_fork() -> None:
    """Forget the parent's unfinished work in a forked child, where its locks stay locked."""
    deferred.clear()
    workers.clear()


os.register_at_fork(after_in_child=_note_fork)


class _Handler:
    """A user's handler, called at once or later."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _find_inside(frame) is not None:
            deferred.setdefault(number, time.monotonic())
        else:
            _call(self.handler, number, frame)


def _find_inside(frame: FrameType | None) -> CodeType | None:
    """Return the innermost uninterrupted function on a stack."""
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
        if callable(handler):  # else it has been removed meanwhile
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
