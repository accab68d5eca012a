"""The engine: lanes over the transports of one world."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hvdlite.engine.handle import Handle
from hvdlite.engine.lane import Lane
from hvdlite.engine.operation import Operation
from hvdlite.settings import Settings
from hvdlite.transport import connect

__all__ = ["Engine", "Handle", "Lane", "Operation"]


class Engine:
    """The lanes of a world; making and closing one are collective.

    Attributes:
        gradients: the lane of gradient buckets.
        named: the lane of everything that users submit by name.

    Args:
        MPI: the module ``mpi4py.MPI``.
        comm: the world's communicator; each lane gets one of its own.
        settings: read at ``init()``.
    """

    def __init__(self, MPI: Any, comm: Any, settings: Settings) -> None:  # noqa: N803
        self.settings = settings
        self.gradients = Lane("gradients", connect(MPI, comm), settings)
        self.named = Lane("named", connect(MPI, comm), settings)
        self._counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._counting = threading.Lock()

    def unnamed(self, kind: str) -> str:
        """The next name for an operation that the user gave none.

        Ranks pair unnamed operations by the order of their submission.
        """
        with self._counting:
            return f"{kind}.noname.{next(self._counters[kind])}"

    def close(self) -> bool:
        """Close all lanes within the time that the settings allow.

        Returns:
            Whether all ranks have closed them.
        """
        deadline = time.monotonic() + self.settings.shutdown_timeout_seconds
        lanes = (self.gradients, self.named)
        for lane in lanes:  # all of them first: others may wait for this rank in any
            lane.begin_close()
        closed = [lane.close(max(deadline - time.monotonic(), 0.0)) for lane in lanes]
        return all(closed)
