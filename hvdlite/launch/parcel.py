"""Objects as they travel: a pickle, and large arrays beside it, which are not copied into it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

Part = bytes | bytearray | memoryview


def pack(obj: Any) -> list[Part]:
    """Pickle an object, by value what cannot be imported elsewhere.

    Returns:
        The buffers of its arrays, which are the arrays' own memory, and last the pickle.
    """
    import cloudpickle  # type: ignore[import-untyped]

    buffers: list[pickle.PickleBuffer] = []
    pickled: bytes = cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return [*(buffer.raw() for buffer in buffers), pickled]


def unpack(parts: Sequence[Part]) -> Any:
    """The object; arrays live in the memory of their parts."""
    *buffers, pickled = parts
    return pickle.loads(pickled, buffers=buffers)
