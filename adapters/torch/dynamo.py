"""Marks for functions that ``torch.compile`` must not trace.

Dynamo breaks its graph at calls of these functions, because a graph cannot contain communication.
The marks add nothing to the time of a call, and avoid the import of ``torch._dynamo``, which takes
a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame as _frames

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Exclude a function, and the functions that it calls, from tracing by Dynamo.

    Before torch 2.7, which introduced the marks, this wraps the function.
    """
    if not hasattr(_frames, "set_code_exec_strategy"):
        disable = torch._disable_dynamo  # type: ignore[attr-defined]
        return cast(_Function, disable(function))
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "hvdlite communicates here"  # type: ignore[attr-defined]
    return function


def untraced_methods(*names: str) -> Callable[[type], type]:
    """Return a class decorator that applies `untraced` to methods, also static ones."""

    def mark(kind: type) -> type:
        for name in names:
            is_static = isinstance(vars(kind)[name], staticmethod)
            method = untraced(getattr(kind, name))
            setattr(kind, name, staticmethod(method) if is_static else method)
        return kind

    return mark


def untrace_all(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Apply `untraced` to the functions of these names in a module's namespace."""
    for name in names:
        if isinstance(namespace.get(name), FunctionType):
            namespace[name] = untraced(namespace[name])
