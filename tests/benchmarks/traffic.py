"""What hvdlite sends over its transports, counted there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hvdlite import engine
from tests.transport.counting import CountingTransport


class Traffic:
    """The bytes that this rank sends by the gradient lane of the engine that is made meanwhile."""

    def __init__(self) -> None:
        self._made: list[CountingTransport] = []

    def sent(self) -> int:
        """So far; agreement among the ranks included."""
        (lane,) = (each for each in self._made if each.lane == "gradients")
        return lane.sent

    def connect(self, *args: Any) -> CountingTransport:
        """Do what the function of this name does, and count."""
        self._made.append(CountingTransport(_connect(*args)))
        return self._made[-1]


_connect = engine.connect


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Let an engine that is made in this context count what it sends."""
    traffic = Traffic()
    with mock.patch.object(engine, "connect", traffic.connect):
        yield traffic
