"""A state of plain Python objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hvdlite import collectives
from hvdlite.elastic.state import State


class ObjectState(State):
    """A state whose parts are its attributes, anything that can be copied and pickled.

    Example::

        state = ObjectState(epoch=0, batch=0)
        state.epoch += 1
        state.commit()

    Args:
        bcast_object: a function that returns rank 0's object on all ranks; None: hvdlite's.
        get_rank: not needed; accepted because Horovod takes it.
        **kwargs: the attributes, and their values at the start.

    Raises:
        ValueError: the class has an attribute or a method of such a name.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._bcast_object = bcast_object or _broadcast
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            if hasattr(self, name):
                raise ValueError(
                    f"{name!r} is a part of {type(self).__name__} already; give the value another "
                    "name"
                )
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        ObjectState.save(self)

    def save(self) -> None:
        """Keep deep copies of the attributes."""
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Set the attributes to what was saved last."""
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them; collective.

        Raises:
            HorovodInternalError: a value cannot be pickled, or communication failed.
        """
        self._set(self._bcast_object(self._values()))
        ObjectState.save(self)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _broadcast(value: Any) -> Any:
    return collectives.broadcast_object(value, 0, "elastic.objects")
