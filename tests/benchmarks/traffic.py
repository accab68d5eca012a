"""Count the bytes that hvdlite sends over its transports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hvdlite.transport import registry
from hvdlite.transport.counting import CountingTransport


class Traffic:
    """Counter of the bytes that this rank sends by the gradient lane of a new engine."""

    def __init__(self) -> None:
        self._made: list[CountingTransport] = []

    def sent(self) -> int:
        """Return the bytes sent so far, including the ranks' agreement."""
        (lane,) = (each for each in self._made if each.lane == "gradients")
        return lane.sent

    def connect(self, *args: Any) -> CountingTransport:
        """Connect as the function of this name does, and count."""
        self._made.append(CountingTransport(_connect(*args)))
        return self._made[-1]


_connect = registry.connect


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Let an engine that is made in this context count what it sends."""
    traffic = Traffic()
    with mock.patch.object(registry, "connect", traffic.connect):
        yield traffic
