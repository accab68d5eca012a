"""What training can return to after a failure."""

from __future__ import annotations

import abc
import enum
import queue
from collections.abc import Callable, Iterable

import numpy as np

from hvdlite import collectives
from hvdlite.errors import HostsUpdatedInterrupt
from hvdlite.reduction import Max


class HostUpdate(enum.IntFlag):
    """How the set of hosts has changed; both at once is possible."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class State(abc.ABC):
    """What a training function needs to go on: `run` saves, restores and spreads it.

    A class of one's own defines `save`, `restore` and `sync`, and calls
    ``super().__init__()``.

    Attributes:
        commits: how many there have been.
    """

    def __init__(self) -> None:
        self.commits = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_update = 0.0

    def commit(self) -> None:
        """Keep the state as it is now, and look whether the set of hosts has changed; collective.

        The ranks meet first, so that none keeps a step that another has not finished.

        Raises:
            HostsUpdatedInterrupt: the set of hosts has changed; the state has been kept.
            HorovodInternalError: a rank is gone or has given up; nothing has been kept.
        """
        try:
            self.check_host_updates()
        except HostsUpdatedInterrupt:
            self._keep()
            raise
        self._keep()

    def _keep(self) -> None:
        self.save()
        self.commits += 1

    @abc.abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Return to what was saved last."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it; collective."""

    def merge(self) -> None:  # noqa: B027 - most states have nothing to merge
        """Tell all ranks what each has done of the shared work; collective.

        This is the part of `sync` that is needed whenever ranks have changed, also where all
        of them have the same weights. By default nothing.
        """

    def reset(self) -> None:  # noqa: B027 - nor anything to adapt
        """Adapt to a new world, before the callbacks are called; by default nothing."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to be called, without arguments, when a new world has been formed.

        They adapt what depends on the number of ranks: the learning rate, say.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `run` on every rank when a new world has been formed."""
        self._host_messages = queue.SimpleQueue()  # the new world knows of them
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell this rank that the set of hosts has changed; from any thread.

        One rank that is told is enough.

        Args:
            timestamp: when, in seconds; what is not newer than the last update is ignored.
            update_res: a `HostUpdate`.
        """
        self._host_messages.put((timestamp, update_res))

    def check_host_updates(self) -> None:
        """Look whether any rank has been told of a change of the hosts; collective.

        Raises:
            HostsUpdatedInterrupt: yes; on all ranks in the same call.
            HorovodInternalError: a rank is gone or has given up.
        """
        newest, update = self._last_update, HostUpdate.NONE
        while not self._host_messages.empty():
            timestamp, told = self._host_messages.get()
            if timestamp > self._last_update:
                newest, update = max(newest, timestamp), update | HostUpdate(told)
        removed, added = HostUpdate.REMOVED in update, HostUpdate.ADDED in update
        mine = np.array([newest, removed, added], np.float64)
        newest, *found = collectives.allreduce(mine, name="elastic.host_updates", op=Max).tolist()
        self._last_update = newest
        if any(found):
            raise HostsUpdatedInterrupt(skip_sync=not found[1])
