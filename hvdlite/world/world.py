"""World: the ranks that communicate, and the nodes that they run on.

There is one world of all ranks, and one for each process set.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hvdlite.errors import HorovodInternalError, NotInitializedError
from hvdlite.world import launchers

#: Makes a communicator by calling the given function; see `hvdlite.elastic.forming`.
Create = Callable[..., Any]


def create_at_once(make: Callable[..., Any], *args: Any) -> Any:
    """Make a communicator, in a job that ends when a rank dies."""
    return make(*args)


@dataclass(frozen=True)
class World:
    """The ranks of a job or of a process set, as seen from this rank.

    Attributes:
        comm: a communicator of hvdlite's own over all ranks (``mpi4py.MPI.Comm``).
        node: the communicator of the ranks on this rank's node.
        cross: the communicator of the ranks, one from each node, with this local rank.
        nodes: for each rank the index of its node.
        ids: for each rank its number in the world that ``init()`` has formed; ascending. A rank
            keeps it when others die, and in process sets. Messages name ranks by it.
    """

    comm: Any
    node: Any
    cross: Any
    nodes: tuple[int, ...]
    ids: tuple[int, ...]
    create: Create = create_at_once

    @classmethod
    def split(
        cls,
        MPI: Any,  # noqa: N803
        comm: Any,
        local_size: int = 0,
        create: Create = create_at_once,
        ids: Sequence[int] | None = None,
    ) -> World:
        """Create the world of a communicator's ranks; collective.

        Args:
            comm: the communicator, which the world takes over.
            local_size: consecutive ranks that count as one node; 0: MPI finds the nodes.
            ids: the ranks' ids; None: 0, 1, ...
        """
        rank = comm.rank
        if local_size:
            node = create(comm.Split, rank // local_size, rank)
        else:
            node = create(comm.Split_type, MPI.COMM_TYPE_SHARED, rank)
        return cls._of(comm, node, ids or range(comm.size), create)

    def subset(self, ids: Sequence[int]) -> World:
        """Create the world of some of the ranks; collective among these.

        Args:
            ids: the ids of these ranks, ascending; this rank's is among them.
        """
        # Others may create a set at the same time that has some of these ranks.
        tag = zlib.crc32(repr(tuple(ids)).encode()) & 0x7FFF
        comm = self.comm.Create_group(self.comm.group.Incl(self.numbers(ids)), tag)
        return self.around(comm, ids, create_at_once)

    def split_off(self, MPI: Any, ids: Sequence[int], create: Create) -> Any:  # noqa: N803
        """Create the communicator of some of the ranks; collective among all of them.

        Unlike ``MPI_Comm_create_group``, it ends in an error when a rank dies.

        Args:
            ids: ascending.

        Returns:
            None on a rank that is not one of them.
        """
        is_member = self.id in ids
        color = 0 if is_member else MPI.UNDEFINED
        comm = create(self.comm.Split, color, self.comm.rank)
        return comm if is_member else None

    def around(self, comm: Any, ids: Sequence[int], create: Create) -> World:
        """Create the world of a communicator of some of the ranks; collective among these.

        Args:
            comm: the communicator, which the world takes over.
            ids: of its ranks, ascending.
        """
        node = create(comm.Split, self.node_index, comm.rank)
        return World._of(comm, node, ids, create)

    @classmethod
    def _of(cls, comm: Any, node: Any, ids: Sequence[int], create: Create) -> World:
        cross = create(comm.Split, node.rank, comm.rank)
        leaders = comm.allgather(node.bcast(comm.rank, root=0))
        index = {leader: position for position, leader in enumerate(sorted(set(leaders)))}
        nodes = tuple(index[leader] for leader in leaders)
        return cls(comm, node, cross, nodes, tuple(ids), create)

    @functools.cached_property
    def group(self) -> Any:
        """The group of the ranks, which may be read when the communicator has been freed.

        It has to be read once before.
        """
        return self.comm.group

    @property
    def id(self) -> int:
        """This rank's of the `ids`."""
        return self.ids[int(self.comm.rank)]

    def numbers(self, ids: Sequence[int]) -> list[int]:
        """Return the ranks in this world that have these ids; those that have died are left out."""
        return [self.ids.index(each) for each in ids if each in self.ids]

    @property
    def node_index(self) -> int:
        """Return the index of this rank's node, in the order of the nodes' lowest ranks."""
        return self.nodes[int(self.comm.rank)]

    def free(self) -> None:
        """Free the communicators; collective."""
        for comm in (self.cross, self.node, self.comm):
            comm.Free()


_current: World | None = None

#: Whether this process was started by a rank, and has not entered a world of its own since.
is_child = False


def _note_fork() -> None:
    global is_child
    is_child = True


os.register_at_fork(after_in_child=_note_fork)


def child_error() -> HorovodInternalError:
    """Return the error for a child of a rank that tries to communicate."""
    return HorovodInternalError(
        f"process {os.getpid()} was started by rank {rank()} after init() and cannot "
        "communicate; do it in the rank itself"
    )


def enter(world: World | None) -> None:
    """Have the functions of this module describe ``world``; None: ``init()`` is due."""
    global _current, is_child
    _current = world
    is_child = False
    if world is not None:
        comms = (world.comm, world.node, world.cross)
        place = [[(comm.rank, comm.size) for comm in comms], world.nodes]
        launchers.note_rank(world.comm.rank, place)


def enter_of_parent(place: Any) -> None:
    """Have the functions of this module describe the world of the rank that started this process.

    As in a forked child, calls that communicate raise an error.

    Args:
        place: the rank's place, which `enter` has published.
    """
    global _current, is_child
    comms, nodes = place
    # The properties of a communicator that another process knows.
    comm, node, cross = (SimpleNamespace(rank=rank, size=size) for rank, size in comms)
    _current = World(comm, node, cross, tuple(nodes), tuple(range(len(nodes))))
    is_child = True


def current() -> World:
    """Return the world of this process.

    Raises:
        NotInitializedError: before ``init()`` and after ``shutdown()``.
    """
    if _current is None:
        raise NotInitializedError
    return _current


def is_initialized() -> bool:
    """Return whether ``init()`` has been called, and ``shutdown()`` not since."""
    return _current is not None


def rank() -> int:
    """Return this process's rank, 0 to ``size() - 1``; before ``init()``: ``ValueError``."""
    return int(current().comm.rank)


def size() -> int:
    """Return the number of ranks; before ``init()``: ``ValueError``."""
    return int(current().comm.size)


def local_rank() -> int:
    """Return this process's rank within its node; before ``init()``: ``ValueError``."""
    return int(current().node.rank)


def local_size() -> int:
    """Return the number of ranks on this node; before ``init()``: ``ValueError``."""
    return int(current().node.size)


def cross_rank() -> int:
    """Return the index of this node among those that have this local rank."""
    return int(current().cross.rank)


def cross_size() -> int:
    """Return the number of nodes that have this local rank."""
    return int(current().cross.size)


def node_index() -> int:
    """Return the index of this rank's node, in the order of the nodes' lowest ranks."""
    return current().node_index


def is_homogeneous() -> bool:
    """Return whether every node has the same number of ranks."""
    nodes = current().nodes
    return len({nodes.count(node) for node in set(nodes)}) == 1


def choose(MPI: Any, comm: Any | Sequence[int] | None) -> Any:  # noqa: N803
    """Create a communicator from the argument of ``init``; collective.

    Args:
        comm: None (all ranks), a list of ranks of ``COMM_WORLD``, or a communicator.

    Raises:
        ValueError: the list is empty, repeats a rank, names one that does not exist, or
            omits this one; or the communicator is the null one.
        TypeError: the argument has another type.
    """
    if comm is None:
        return MPI.COMM_WORLD.Dup()
    if isinstance(comm, MPI.Comm):
        if comm == MPI.COMM_NULL:
            raise ValueError(
                f"init() got COMM_NULL on rank {MPI.COMM_WORLD.rank}, which therefore takes no "
                "part; call it on the communicator's ranks only"
            )
        return comm.Dup()
    if isinstance(comm, (str, bytes)) or not isinstance(comm, Sequence):
        raise TypeError(
            f"init() takes None, a list of ranks or an mpi4py communicator, not {comm!r}"
        )
    world = MPI.COMM_WORLD
    ranks = [int(rank) for rank in comm]
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world.size)):
        raise ValueError(
            f"init({ranks}): the list must name each rank once, out of 0 to {world.size - 1}"
        )
    if world.rank not in ranks:
        raise ValueError(
            f"init({ranks}) was called on rank {world.rank}, which is not in the list; "
            "call it on the listed ranks only"
        )
    return world.Create_group(world.group.Incl(ranks))
