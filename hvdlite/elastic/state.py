"""States that training can return to after a failure."""

from __future__ import annotations

import abc
import copy
import enum
import queue
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.base.arrays import describe
from hvdlite.base.reduction import Max
from hvdlite.elastic import resizing, start
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.world import parts, world


class HostUpdate(enum.IntFlag):
    """The kind of a change of the hosts; both kinds may come at once."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class StopInterrupt(HostsUpdatedInterrupt):
    """All ranks stop, and the job goes on with another number of them."""


class State(abc.ABC):
    """The state of a training function, which `run` saves, restores and synchronises.

    A subclass defines `save`, `restore` and `sync`, and calls
    ``super().__init__()``.

    Attributes:
        commits: the number of commits so far.
    """

    def __init__(self) -> None:
        self.commits = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_update = 0.0

    def commit(self) -> None:
        """Keep the current state, and check for a change of the hosts; collective.

        The ranks meet first, so that none keeps a step that another has not finished. In the middle
        of a step of virtual ranks, which processes come to in their own time, nothing happens.

        Raises:
            HostsUpdatedInterrupt: the set of hosts has changed; the state has been kept.
            HorovodInternalError: a rank is gone or has given up; nothing has been kept.
        """
        if parts.current.is_within_step():
            return
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
        """Return to the last saved state."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it; collective."""

    def merge(self) -> None:  # noqa: B027 - most states have nothing to merge
        """Share each rank's part of the work with all ranks; collective.

        This is the part of `sync` that is needed whenever ranks have changed, even if all of
        them have the same weights. By default it does nothing.
        """

    def gather(self) -> None:
        """Bring what other ranks have, and the next run needs, to rank 0; collective.

        By default, do what `merge` does.
        """
        self.merge()

    def dump(self) -> Any:
        """Return the state for a job that goes on with another number of ranks; picklable.

        Rank 0 calls it where hosts come and go (``hvdliterun --host-discovery-script``).

        Raises:
            HorovodInternalError: The class does not define it.
        """
        raise HorovodInternalError(
            f"{type(self).__name__} cannot go on with another number of ranks, since it has no "
            "dump() and load(dump); define them, or use ObjectState or TorchState"
        )

    def load(self, dump: Any) -> None:
        """Take on a state that `dump` has returned in another process; called on all ranks."""
        raise NotImplementedError

    def reset(self) -> None:  # noqa: B027 - nor anything to adapt
        """Adapt to a new world, before the callbacks are called; by default do nothing."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to be called, without arguments, when a new world has been formed.

        They adapt values that depend on the number of ranks, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new world; called by `run` on every rank."""
        self._host_messages = queue.SimpleQueue()  # the new world knows of them
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell this rank that the set of hosts has changed; from any thread.

        One rank that is told is enough.

        Args:
            timestamp: time in seconds; an update that is not newer than the last one is ignored.
            update_res: a `HostUpdate`.
        """
        self._host_messages.put((timestamp, update_res))

    def check_host_updates(self) -> None:
        """Check whether any rank has been told of a change of the hosts; collective.

        Raises:
            HostsUpdatedInterrupt: yes; on all ranks in the same call.
            HorovodInternalError: a rank is gone or has given up.
        """
        newest, update = self._last_update, HostUpdate.NONE
        while not self._host_messages.empty():
            timestamp, told = self._host_messages.get()
            if timestamp > self._last_update:
                newest, update = max(newest, timestamp), update | HostUpdate(told)
        pool = start.pool()
        died = pool is not None and pool.lacks(world.size())
        removed, added = died or HostUpdate.REMOVED in update, HostUpdate.ADDED in update
        mine = np.array([newest, removed, added, resizing.wants_stop()], np.float64)
        newest, *found = collectives.allreduce(mine, name="elastic.host_updates", op=Max).tolist()
        self._last_update = newest
        if found.pop():
            raise StopInterrupt(skip_sync=False)
        if any(found):
            raise HostsUpdatedInterrupt(skip_sync=not found[1])


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
        """Set the attributes to their saved values."""
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them; collective.

        Raises:
            HorovodInternalError: a value cannot be pickled, or communication failed.
        """
        self._set(self._bcast_object(self._values()))
        ObjectState.save(self)

    def dump(self) -> Any:
        """Return the attributes by name."""
        return {"values": self._values()}

    def load(self, dump: Any) -> None:
        """Set the attributes, and save them."""
        self._set(dump["values"])
        ObjectState.save(self)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class VariableState(ObjectState):
    """A state of variables that have ``numpy()`` and ``assign()``, and of other attributes.

    A subclass defines `variables_kept`.

    Args:
        **kwargs: as for `ObjectState`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kept: list[tuple[Any, Any]] = []
        self._keep_values()

    def variables_kept(self) -> Sequence[Any]:
        """Return the variables that are saved and restored."""
        raise NotImplementedError

    def variables_shared(self) -> Sequence[Any]:
        """Return the variables that `sync` gives to all ranks; by default all."""
        return self.variables_kept()

    def save(self) -> None:
        """Keep copies of the variables' values and of the other attributes."""
        super().save()
        self._keep_values()

    def restore(self) -> None:
        """Assign the saved values."""
        super().restore()
        for variable, value in self._kept:
            variable.assign(value)

    def sync(self) -> None:
        """Give all ranks rank 0's variables and other attributes, and save them; collective.

        Raises:
            HorovodInternalError: the ranks disagree on the variables, or communication failed.
        """
        super().sync()
        variables = self.variables_shared()
        arrays = [np.asarray(variable.numpy()) for variable in variables]
        layout = [
            (getattr(variable, "path", None) or variable.name, describe(array))
            for variable, array in zip(variables, arrays, strict=True)
        ]
        collectives.agree_on("elastic.variables", layout)
        for number, (variable, array) in enumerate(zip(variables, arrays, strict=True)):
            variable.assign(collectives.broadcast(array, 0, f"elastic.variable.{number}"))
        self.save()

    def dump(self) -> Any:
        """Return the attributes, and the variables that `sync` gives to all ranks."""
        arrays = [np.array(variable.numpy()) for variable in self.variables_shared()]
        return {**super().dump(), "variables": arrays}

    def load(self, dump: Any) -> None:
        """Assign the variables, set the attributes, and save them.

        Raises:
            HorovodInternalError: The variables are not those of the state.
        """
        super().load(dump)
        variables, arrays = self.variables_shared(), dump["variables"]
        shapes = [np.asarray(variable.numpy()).shape for variable in variables]
        if shapes != [array.shape for array in arrays]:
            raise HorovodInternalError(
                f"the state of the previous run has {len(arrays)} variables, this one "
                f"{len(shapes)}, or their shapes differ; the script has to make the same ones on "
                "any number of ranks"
            )
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)
        self.save()

    def _keep_values(self) -> None:
        self._kept = [(v, np.array(v.numpy())) for v in self.variables_kept()]


def _broadcast(value: Any) -> Any:
    return collectives.broadcast_object(value, 0, "elastic.objects")
