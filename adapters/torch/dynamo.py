"""Functions that ``torch.compile`` runs as they are, instead of tracing into them.

Where compiled code calls one, Dynamo breaks its graph: communication cannot be a part of it. The
marks cost a call nothing, and need no import of ``torch._dynamo``, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame as _frames

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep Dynamo out of a function, and out of all that it calls.

    Where torch is too old for marks (before 2.7), the function is wrapped.
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
    """Do the same for some methods of a class, static ones included."""

    def mark(kind: type) -> type:
        for name in names:
            method = vars(kind)[name]
            if isinstance(method, staticmethod):
                setattr(kind, name, staticmethod(untraced(method.__func__)))
            else:
                setattr(kind, name, untraced(method))
        return kind

    return mark


def untrace_all(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Do the same for the functions of some names in a module."""
    for name in names:
        if isinstance(namespace[name], FunctionType):
            namespace[name] = untraced(namespace[name])
