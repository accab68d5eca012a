"""Errors that are both TensorFlow's and hvdlite's, in eager mode and out of graphs.

::

    cause                               class                     TensorFlow's class
    the ranks disagree                  MismatchError             FailedPreconditionError
    a gradient that cannot be sent      GradientError             InvalidArgumentError
    averages that are not finite        NotFiniteError            InvalidArgumentError
    a bad argument on this rank         ArgumentError             InvalidArgumentError
    a rank is gone, or MPI has failed   HorovodInternalError      UnknownError

They are subclasses of hvdlite's classes of the same names, except `ArgumentError`, which is a
ValueError. The right column is in ``tf.errors``. So a script may catch either kind.

A graph has status codes instead of exceptions: an exception in one of its Python operations becomes
text under the code UNKNOWN or INVALID_ARGUMENT, and the caller of the graph gets the class
that belongs to the code. This module replaces it by the class that the text names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from hvdlite import errors
from hvdlite.base.interrupts import is_from_handler
from hvdlite.observe.failures import is_users

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Constructor:
    """A constructor with TensorFlow's arguments, or the message only, as Keras copies errors."""

    # The names are those by which AutoGraph recognises what it can copy.
    def __init__(
        self, node_def: Any = None, op: Any = None, message: str | None = None, *args: Any
    ) -> None:
        if message is None:
            node_def, message = None, str(node_def)
        super().__init__(node_def, op, message, *args)  # type: ignore[call-arg]
        self.args = (message,)


class MismatchError(_Constructor, tf.errors.FailedPreconditionError, errors.MismatchError):
    """Two ranks submitted different operations under the same name."""


class HorovodInternalError(_Constructor, tf.errors.UnknownError, errors.HorovodInternalError):
    """A collective failed, or a rank is gone."""


class GradientError(_Constructor, tf.errors.InvalidArgumentError, errors.GradientError):
    """A gradient cannot be exchanged as requested, on all ranks."""


class NotFiniteError(GradientError, errors.NotFiniteError):
    """Averages of gradients are NaN or infinite, on all ranks, where that is refused."""


class ArgumentError(_Constructor, tf.errors.InvalidArgumentError, ValueError):
    """An argument is wrong, which this rank can tell by itself."""


class UnsupportedError(ArgumentError, errors.UnsupportedError):
    """An argument asks for something that the call does not support."""


def translated(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Wrap a function that calls the core such that it raises the classes of this module."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (errors.HorovodInternalError, ValueError) as error:
            # While a graph is made, AutoGraph replaces classes that it does not know.
            is_plain = isinstance(error, errors.NotInitializedError) and tf.executing_eagerly()
            if is_plain or isinstance(error, tf.errors.OpError) or is_from_handler(error):
                raise
            kind = next(_KINDS[each] for each in type(error).__mro__ if each in _KINDS)
            # Into a graph's status, too: hence "from None", without which all of it would come
            # twice, and without hvdlite's own lines.
            trace = error.__traceback__ if _log.isEnabledFor(logging.DEBUG) else None
            raise kind(None, None, str(error)).with_traceback(trace) from None

    return call


_KINDS: dict[type[Exception], type[tf.errors.OpError]] = {
    errors.MismatchError: MismatchError,
    errors.NotFiniteError: NotFiniteError,
    errors.GradientError: GradientError,
    errors.HorovodInternalError: HorovodInternalError,
    errors.UnsupportedError: UnsupportedError,
    ValueError: ArgumentError,
}
# By the name that a graph's status has.
_NAMED_KINDS = {
    **{kind.__name__: kind for kind in _KINDS.values()},
    "NotInitializedError": ArgumentError,
}
_log = logging.getLogger("hvdlite")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.M)
_NAMED = re.compile(rf"(?<!\S)({'|'.join(_NAMED_KINDS)}): ")


def named_by(error: tf.errors.OpError) -> tf.errors.OpError:
    """Return an error as the class that its text names; itself if that is none of these classes."""
    named = _NAMED.search(error.message)
    if named is None:
        return error
    kind = _NAMED_KINDS[named[1]]
    is_argument = issubclass(kind, ArgumentError)
    code = tf.errors.INVALID_ARGUMENT if is_argument else tf.errors.UNKNOWN
    if error.error_code != code or isinstance(error, kind):
        return error
    message = _shortened(error.message, named.start())
    return kind(error.node_def, error.op, message, error.experimental_payloads)


def _shortened(message: str, start: int) -> str:
    """Return the text of an error, which TensorFlow puts between two tracebacks, and its line."""
    if _log.isEnabledFor(logging.DEBUG):
        return message
    text, _, _ = message[start:].partition("\nTraceback (most recent call last):")
    made = [(file, number) for file, number in _FRAME.findall(message[:start]) if is_users(file)]
    return text.strip() + (f" (an operation of {made[-1][0]}:{made[-1][1]})" if made else "")


def naming_errors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function such that errors of graphs get the class that their text names."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except tf.errors.OpError as error:
            named = named_by(error)
            if named is error:
                raise
            raise named.with_traceback(error.__traceback__) from None
        after_graph()
        return result

    return call


#: Called after each graph; assign another function.
after_graph: Callable[[], object] = lambda: None  # noqa: E731

# There is no public hook for the errors of graphs. If a later TensorFlow lacks these methods, they
# have the class of the code, and the same text.
with contextlib.suppress(ImportError, AttributeError):
    from tensorflow.python.client.session import BaseSession
    from tensorflow.python.eager.context import Context

    Context.call_function = naming_errors(Context.call_function)
    BaseSession.run = naming_errors(BaseSession.run)
