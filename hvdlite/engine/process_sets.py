"""Process sets: groups of ranks that exchange among themselves."""

from __future__ import annotations

import dataclasses
import operator
import pickle
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from hvdlite.base.interrupts import deferred, leave
from hvdlite.engine import Engine, Lane
from hvdlite.engine.operation import Barrier, Gather, Signature
from hvdlite.errors import ranks_text
from hvdlite.observe.status import Pending
from hvdlite.world import world
from hvdlite.world.world import World


class ProcessSet:
    """A subset of the ranks, for collectives in which only these take part.

    It can be used once it has been registered, by ``init(process_sets=[...])`` or
    `add_process_set`, which all ranks call with the same sets, members or not.

    Args:
        ranks_or_comm: The ranks, in any order, or an mpi4py communicator of them. Communicators may
            differ, as those of ``MPI_Comm_split`` do: each rank's object is the set that it is in.

    Attributes:
        process_set_id: A number, the same on all ranks; None: it is not registered.
        comm: The communicator, if it was made of one.
        ranks: The ranks in ascending order; None for a communicator's set that is not registered.
        labels: How many labels of exchanges its ranks have made, in one order. It outlives the
            engine, so that exchanges keep their names whichever is the first to use a new world.

    Raises:
        ValueError: A rank is no integer.
    """

    process_set_id: int | None = None
    ranks: list[int] | None
    labels = 0

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.comm = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.comm, self.ranks = ranks_or_comm, None
            return
        try:
            self.ranks = sorted(map(operator.index, ranks_or_comm))
        except TypeError:
            raise ValueError(
                "a process set needs a list of integers, the numbers of its ranks; found "
                f"{ranks_or_comm!r}"
            ) from None

    def size(self) -> int | None:
        """Return the number of ranks; None: the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return this process's rank within the set; None: the set is not registered.

        Raises:
            ValueError: this process is no member.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {world.rank()} is not in {self!r}")
        return (self.ranks or []).index(world.rank())

    def included(self) -> bool | None:
        """Return whether this process is a member; None: the set is not registered."""
        return None if self.process_set_id is None else world.rank() in (self.ranks or ())

    # A set is registered itself, and not what equals it: a model's copy has the set of the model.

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        return self

    def __reduce__(self) -> Any:
        return "global_process_set" if self is global_process_set else (ProcessSet, (self.ranks,))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def resolve(self, whole: World) -> tuple[int, ...]:
        """Return the ids of the ranks in a world; see `World.ids`.

        Raises:
            ValueError: there are none, one is named twice or does not exist.
        """
        ranks = self.ranks
        if self.comm is not None:
            group = self.comm.Get_group()
            positions = range(group.size)
            ranks = sorted(group.Translate_ranks(list(positions), whole.group))
        ranks = ranks or []
        size = len(whole.ids)  # its communicator may have been replaced
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
            raise ValueError(
                f"a process set must name each of its ranks once, out of 0 to {size - 1}; "
                f"found {ranks}"
            )
        return tuple(whole.ids[rank] for rank in ranks)


#: All ranks.
global_process_set = ProcessSet([])


class ProcessSets:
    """The process sets of a world, and the engines of those that this rank is in."""

    def __init__(
        self,
        MPI: Any,  # noqa: N803
        whole: World,
        engine: Engine,
    ) -> None:
        self._mpi = MPI
        self._supervisor = engine.supervisor
        self._supervisor.add(engine)
        self._global = engine
        self._sets: dict[int, ProcessSet] = {}
        self._ids: dict[int, Sequence[int]] = {}
        self._engines: dict[int, Engine] = {}
        self._next = 1
        self.follow(whole)
        self._enter(global_process_set, 0, whole.ids, engine)

    def engine(self, process_set: ProcessSet) -> Engine:
        """Return the engine of a process set.

        Raises:
            ValueError: it is not registered, or this rank is not in it.
        """
        number = getattr(process_set, "process_set_id", None)
        if number is None or self._sets.get(number) is not process_set:
            raise ValueError(
                f"rank {world.rank()}: {process_set!r} is not a registered process set; pass it to "
                "hvd.init(process_sets=[...]) or hvd.add_process_set() on all ranks"
            )
        found = self._engines.get(number)
        if found is None:
            raise ValueError(
                f"rank {world.rank()} is not in {process_set!r}; call its collectives on "
                f"{ranks_text(process_set.ranks or [])} only"
            )
        return found

    def pending(self) -> list[Pending]:
        """Return the operations of all process sets that have not ended."""
        engines = list(self._engines.values())
        return [each for engine in engines for each in engine.pending()]

    @property
    def added(self) -> list[ProcessSet]:
        """The process sets that all ranks have registered, but the global one, oldest first."""
        return [process_set for number, process_set in sorted(self._sets.items()) if number > 0]

    def find(self, process_set_id: int) -> ProcessSet:
        """Return the process set of a number; raise ValueError if there is none."""
        try:
            return self._sets[process_set_id]
        except KeyError:
            raise ValueError(
                f"rank {world.rank()}: there is no process set with the id {process_set_id}"
            ) from None

    def add(self, process_set: ProcessSet, of: World | None = None) -> None:
        """Do `hvdlite.add_process_set`.

        Args:
            of: The world that its ranks are numbered in, of which some may have died since; None:
                the current one.
        """
        ids = self._resolve(process_set, of)
        own = pickle.dumps((ids, process_set.comm is None))
        signature = Signature((("the operation", "add_process_set"),))
        gather = Gather(self._global.unnamed("add_process_set"), signature, own)
        gather.stands_in = False  # a rank that has joined does not know the set
        given = [*map(pickle.loads, self._global.named.run(gather))]
        parts = dict.fromkeys(part for part, _ in given)
        # Communicators may divide the ranks, each of which knows the set that it is in. Lists may
        # not, also where the members give a communicator, which the others lack.
        if len(parts) > 1 and any(is_list for _, is_list in given):
            self._agree("add_process_set", ("the ranks of the process set", ids))
        for other in (global_process_set, *self.added):  # those that all ranks know
            if any(other.ranks == self._whole.numbers(part) for part in parts):
                raise ValueError(f"{other!r} has the same ranks; use that one")
        for part in parts:
            self._form(process_set if part == ids else ProcessSet(self._whole.numbers(part)), part)

    def _form(self, process_set: ProcessSet, ids: Sequence[int]) -> None:
        number, self._next = self._next, self._next + 1

        def make(part: World) -> Engine:
            suffix = f" of process set {number}"
            return Engine(self._mpi, part, self._global.settings, suffix, self._supervisor)

        try:
            enter = partial(self._enter, process_set, number)
            self._supervisor.form_part(ids, self._whole, make, enter)
        finally:
            if deferred:
                leave()

    def add_among_members(self, process_set: ProcessSet, **changes: Any) -> Engine:
        """Register a process set on its members, which alone call this, and return its engine.

        Other sets may have the same ranks. Its number is negative, and the same on the members. It
        ends with the first death among these.

        Args:
            **changes: Of its engine's settings.
        """
        ids = self._resolve(process_set, None)
        if self._whole.id not in ids:
            raise ValueError(f"rank {world.rank()} is not in {process_set!r}, and cannot create it")
        part = self._whole.subset(ids)
        number = min(part.comm.allgather(min(0, *self._sets) - 1))
        settings = dataclasses.replace(self._global.settings, **changes)
        engine = Engine(self._mpi, part, settings, f" of process set {number}")
        self._enter(process_set, number, ids, engine)
        return engine

    def _resolve(self, process_set: ProcessSet, of: World | None) -> tuple[int, ...]:
        ids = process_set.resolve(of or self._whole)
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set!r} is registered already")
        return ids

    def remove(self, process_set: ProcessSet) -> bool:
        """Do `hvdlite.remove_process_set`."""
        if not isinstance(process_set, ProcessSet):
            raise ValueError(
                f"process_set={process_set!r} is of type {type(process_set).__name__}; expected "
                "what hvd.add_process_set() has returned"
            )
        number = process_set.process_set_id
        if not number or self._sets.get(number) is not process_set:
            return False
        engine = self._engines.get(number)
        if number > 0:
            self._agree("remove_process_set", ("the id of the process set", number))
        if engine is not None:
            is_closed = engine.close()
            engine.supervisor.remove(engine)
            if is_closed:
                engine.world.free()
        self._leave(number)
        return True

    def follow(self, whole: World) -> None:
        """Go on in a world, of fewer ranks perhaps."""
        self._whole = whole
        _ = whole.group  # read while there is a communicator
        for number, process_set in self._sets.items():
            process_set.ranks = whole.numbers(self._ids[number])

    def close(self) -> bool:
        """Close all engines, in the time that the settings allow, and unregister the sets.

        If a signal handler raises, call it again.

        Returns:
            Whether all ranks have closed them.
        """
        deadline = time.monotonic() + self._global.settings.shutdown_timeout_seconds
        for engine in self._engines.values():  # all first: others may wait for this rank in any
            engine.begin_close()
        for number in sorted(self._engines, reverse=True):
            engine = self._engines[number]
            if engine.close(max(deadline - time.monotonic(), 0.0)):
                del self._engines[number]
                engine.world.free()
        closed = not self._engines
        if closed:
            self._supervisor.close()
        for number in list(self._sets):
            self._leave(number)
        return closed

    def _agree(self, what: str, entry: tuple[str, Any]) -> None:
        name = self._global.unnamed(what)
        self._global.named.run(Barrier(name, [("what it is called for", what), entry]))

    def _enter(
        self, process_set: ProcessSet, number: int, ids: Sequence[int], engine: Engine | None
    ) -> None:
        process_set.process_set_id, process_set.ranks = number, self._whole.numbers(ids)
        self._sets[number], self._ids[number] = process_set, ids
        if engine is not None:
            self._engines[number] = engine
            for lane in engine.lanes:
                lane.all_lanes = self._lanes

    def _lanes(self) -> list[Lane]:
        return [lane for engine in list(self._engines.values()) for lane in engine.lanes]

    def _leave(self, number: int) -> None:
        self._sets.pop(number).process_set_id = None
        self._engines.pop(number, None)


def is_outside(process_set: Any) -> bool:
    """Return whether a process set is registered, and this rank is not in it.

    Gradients that are for such a set stay this rank's own, as in Horovod.
    """
    return isinstance(process_set, ProcessSet) and process_set.included() is False
