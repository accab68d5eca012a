"""States that training can return to after a failure."""

from __future__ import annotations

import abc
import copy
import enum
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.base.reduction import Max, ReduceOp
from hvdlite.elastic import resizing, spares
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.recipe.batches import Batches
from hvdlite.recipe.sharding import Sharding
from hvdlite.recipe.variables import broadcast_variables
from hvdlite.world import parts, world


class HostUpdate(enum.IntFlag):
    """The kind of a change of the hosts; both kinds may come at once."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class StopInterrupt(HostsUpdatedInterrupt):
    """All ranks stop, and the job goes on with another number of them."""


class Restorable(abc.ABC):
    """Base class of states, and of their handlers, to which training can return."""

    @abc.abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Return to the last saved state."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank 0; collective."""

    def merge(self) -> None:  # noqa: B027 - most have nothing to merge
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
        """Adapt to a new world; by default do nothing."""


class State(Restorable):
    """The state of a training function, which `run` saves, restores and synchronises.

    A subclass defines `save`, `restore` and `sync`, which also saves, and calls
    ``super().__init__()``. `reset` is called before the callbacks.

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

        One rank that is notified is enough.

        Args:
            timestamp: time in seconds; an update that is not newer than the last one is ignored.
            update_res: a `HostUpdate`.
        """
        self._host_messages.put((timestamp, update_res))

    def check_host_updates(self) -> None:
        """Check whether any rank has been notified of a change of the hosts; collective.

        Raises:
            HostsUpdatedInterrupt: yes; on all ranks in the same call.
            HorovodInternalError: a rank is gone or has given up.
        """
        newest, update = self._last_update, HostUpdate.NONE
        while not self._host_messages.empty():
            timestamp, told = self._host_messages.get()
            if timestamp > self._last_update:
                newest, update = max(newest, timestamp), update | HostUpdate(told)
        pool = spares.pool
        died = pool is not None and pool.lacks(world.size())
        removed, added = died or HostUpdate.REMOVED in update, HostUpdate.ADDED in update
        mine = np.array([newest, removed, added, resizing.wants_stop()], np.float64)
        newest, *found = collectives.allreduce(mine, name="elastic.host_updates", op=Max).tolist()
        self._last_update = newest
        if found.pop():
            raise StopInterrupt(skip_sync=False)
        if any(found):
            raise HostsUpdatedInterrupt(skip_sync=not found[1])


class StateHandler(Restorable):
    """Base class of handlers, which save, restore and synchronise one attribute of a state.

    Attributes:
        value: the object that the attribute is.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class StatefulHandler(StateHandler):
    """A handler that saves, restores and synchronises by two methods: `capture` and `apply`.

    By default they are for objects with ``state_dict()`` and ``load_state_dict()``.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def capture(self) -> Any:
        """Return a copy of the object's state; picklable."""
        return copy.deepcopy(self.value.state_dict())

    def apply(self, captured: Any, is_own: bool = False) -> None:
        """Put the object into a state that `capture` has returned, and leave that unchanged.

        Args:
            is_own: whether this process has captured it, so that all of it is this rank's.
        """
        # Some objects keep the tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(captured))

    def capture_common(self) -> Any:
        """Return the part of the state with which another rank may begin; by default all of it."""
        return self.capture()

    def save(self) -> None:
        self._saved = self.capture()

    def restore(self) -> None:
        self.apply(self._saved, is_own=True)

    def sync(self) -> None:
        is_root = world.rank() == 0
        own = self.capture_common() if is_root else None
        common = collectives.broadcast_object(own, 0, f"elastic.{type(self.value).__name__}")
        if not is_root:
            self.apply(common)

    def dump(self) -> Any:
        return self.capture()

    def load(self, dump: Any) -> None:
        self.apply(dump)


class PositionHandler(StatefulHandler):
    """Handles positions in data that all ranks share: `ShardSampler` and ``hvd.shard``."""

    def sync(self) -> None:
        sharding = self.value.sharding
        # Of a spare, too, the global batches are those of the start.
        here = {**self.value.state_dict(), "shares": sharding.shares or sharding.size}
        self.value.load_state_dict(collectives.broadcast_object(here, 0, "elastic.position"))

    def merge(self) -> None:
        # The function is called again, and its loop goes on where the last commit was.
        self.restore()

    def gather(self) -> None:
        """Do nothing: rank 0 has it."""


class VariablesHandler(StatefulHandler):
    """Handles an object's variables, which have ``numpy()`` and ``assign()``.

    Args:
        variables: Returns those of the object that are saved and restored.
        shared: Returns those that `sync` gives to all ranks; None: all.
        changing: A context of the object in which these are changed.
    """

    def __init__(
        self,
        value: Any,
        variables: Callable[[Any], Sequence[Any]],
        shared: Callable[[Any], Sequence[Any]] | None = None,
        changing: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._variables, self._shared = variables, shared or variables
        self._changing = changing
        super().__init__(value)

    def save(self) -> None:
        # With their variables, since others may be made later.
        self._kept = [(each, np.array(each.numpy())) for each in self._variables(self.value)]

    def restore(self) -> None:
        for variable, value in self._kept:
            variable.assign(value)

    def capture(self) -> list[Any]:
        return [np.array(variable.numpy()) for variable in self._shared(self.value)]

    def apply(self, captured: Sequence[Any], is_own: bool = False) -> None:
        variables = self._shared(self.value)
        # Of the values: a variable of TensorFlow may be of any shape.
        shapes = [np.shape(variable.numpy()) for variable in variables]
        if shapes != [array.shape for array in captured]:
            raise HorovodInternalError(
                f"the state of the previous run has {len(captured)} variables, this one "
                f"{len(shapes)}, or their shapes differ; the script has to make the same ones on "
                "any number of ranks"
            )
        with self._changing(self.value):
            for variable, array in zip(variables, captured, strict=True):
                variable.assign(array)

    def sync(self) -> None:
        with self._changing(self.value):
            broadcast_variables(self._shared(self.value), 0, "elastic.variables")


class ExchangeHandler(StatefulHandler):
    """Handles what exchanges of gradients remember: residuals, the steps of a schedule.

    Args:
        find: Returns, by key, the object's exchange states, each with its reduction and its process
            set. It makes those of the keys that it gets, if it can.
    """

    def __init__(
        self,
        value: Any,
        find: Callable[[Any, Iterable[Any]], Mapping[Any, tuple[Any, ReduceOp, ProcessSet]]],
    ) -> None:
        self._find = find
        super().__init__(value)

    def capture(self) -> Any:
        return self._ask("state_dict")

    def capture_common(self) -> Any:
        return self._ask("common_state_dict")

    def apply(self, captured: Any, is_own: bool = False) -> None:
        for key, (state, op, process_set) in self._find(self.value, captured).items():
            if key in captured:
                state.load_state_dict(captured[key], op, process_set, is_own)

    def restore(self) -> None:
        # A state that has been made since begins again.
        found = self._find(self.value, ())
        self.apply({key: self._saved.get(key, {}) for key in found}, is_own=True)

    def gather(self) -> None:
        self._ask("consolidate")

    def _ask(self, method: str) -> dict[Any, Any]:
        found = self._find(self.value, ()).items()
        return {key: getattr(state, method)(where) for key, (state, _, where) in found}


#: The handlers of objects that are not copied, by their type: parts of them are each rank's own.
handlers: list[tuple[type, type[StateHandler]]] = [(Batches, PositionHandler)]


class ObjectState(State):
    """A state whose parts are its attributes, anything that can be copied and pickled.

    Of ``hvd.shard`` it has the position, and each rank keeps its own part of the data.

    Example::

        state = ObjectState(epoch=0, batch=0)
        state.epoch += 1
        state.commit()

    Args:
        bcast_object: a function that returns rank 0's object on all ranks; None: hvdlite's.
        get_rank: not needed; accepted because Horovod takes it.
        **kwargs: the attributes, and their values at the start. A `StateHandler` takes the place of
            the object that it handles.

    Raises:
        ValueError: the class has an attribute or a method of such a name, or a value is a Sharding.
        TypeError: a value cannot be copied; `commit` and `save` raise it, too.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._bcast_object = bcast_object or partial(
            collectives.broadcast_object, name="elastic.objects"
        )
        self._names: list[str] = []  # of the attributes without a handler
        self._handlers: list[tuple[str, StateHandler]] = []
        for name, value in kwargs.items():
            if hasattr(self, name):
                raise ValueError(
                    f"{name!r} is a part of {type(self).__name__} already; give the value another "
                    "name"
                )
            if isinstance(value, Sharding):
                raise ValueError(
                    f"{name!r} is a Sharding, which has its rank's number, and would be rank 0's "
                    "on all ranks; make it in the function, and keep its position() in the state"
                )
            kind = next((handler for kind, handler in handlers if isinstance(value, kind)), None)
            value = value if kind is None else kind(value)
            if isinstance(value, StateHandler):
                self._handlers.append((name, value))
                setattr(self, name, value.value)
            else:
                self._names.append(name)
                setattr(self, name, value)
        self._saved = self._copies()

    def save(self) -> None:
        self._saved = self._copies()
        for handler in self._current():
            handler.save()

    def restore(self) -> None:
        self._set(copy.deepcopy(self._saved))
        for handler in self._current():
            handler.restore()

    def sync(self) -> None:
        """Set the attributes to those of rank 0, and save them; collective.

        What is each rank's own stays so, such as the residuals of a compression and the seeds of
        random layers; records of samples are merged.

        Raises:
            HorovodInternalError: the ranks disagree on parameters or variables, a value cannot be
                pickled, or communication failed.
        """
        self._set(self._bcast_object(self._values()))
        for handler in self._current():
            handler.sync()
        self.save()

    def merge(self) -> None:
        """Merge the records of samples, and save; collective."""
        for handler in self._current():
            handler.merge()
        self.save()

    def gather(self) -> None:
        for handler in self._current():
            handler.gather()

    def dump(self) -> Any:
        return self._values(), [handler.dump() for handler in self._current()]

    def load(self, dump: Any) -> None:
        values, dumps = dump
        self._set(values)
        for handler, each in zip(self._current(), dumps, strict=True):
            handler.load(each)
        self.save()

    def reset(self) -> None:
        for handler in self._current():
            handler.reset()

    def _copies(self) -> dict[str, Any]:
        copies = {}
        copied: dict[int, Any] = {}  # attributes may share objects
        for name, value in self._values().items():
            try:
                copies[name] = copy.deepcopy(value, copied)
            except Exception as error:  # whatever its class does
                raise TypeError(
                    f"{name!r} of {type(self).__name__} cannot be copied ({type(error).__name__}: "
                    f"{error}); keep numbers and arrays in a state, of a loss loss.item() or "
                    "loss.detach(), and open files, locks and iterators outside"
                ) from error
        return copies

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _current(self) -> Iterator[StateHandler]:
        """Yield the handlers, with the current values of their attributes."""
        for name, handler in self._handlers:
            handler.value = getattr(self, name)
            yield handler
