"""Work that one rank does before the others, or for all of them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from hvdlite import collectives
from hvdlite.world import world

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

# The ``per_node`` of the block of `first` that runs in this thread, in which ranks do not meet.
_running: ContextVar[bool | None] = ContextVar("_running", default=None)


def on_rank_zero(function: Callable[_P, _Result]) -> Callable[_P, _Result | None]:
    """Make a function run on rank 0 only; on the other ranks it returns None at once.

    Not collective: the other ranks do not wait for rank 0, and an exception concerns rank 0 alone.
    Before `init` it raises. Use `first` where the other ranks need what rank 0 prepares.

    Example::

        log = hvd.on_rank_zero(print)
        log(f"epoch {epoch}: loss {loss:.3f}")

        @hvd.on_rank_zero
        def plot(losses): ...

    Raises:
        NotInitializedError: By a call of the function; hvdlite is not initialized.
    """

    @functools.wraps(function)
    def only_there(*args: _P.args, **kwargs: _P.kwargs) -> _Result | None:
        return function(*args, **kwargs) if world.rank() == 0 else None

    return only_there


class StandIn:
    """Stands on other ranks for an object of rank 0: its methods do nothing and return None.

    Args:
        kind: The object's class. Names that it lacks are an error on all ranks.
    """

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Callable[..., None]:
        getattr(self._kind, name)
        return lambda *args, **kwargs: None

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def first(per_node: bool = False) -> Iterator[None]:
    """Let rank 0 run a block before the other ranks, which then run it all at once.

    For what must happen once and what every rank then reads: a download, an unpacked archive, a
    cache of prepared data. Collective: every rank enters the block. If the rank that goes first
    dies under ``hvdliterun --elastic``, the next one of those that are left does. A block within
    another, in a library say, is a part of it.

    Example::

        with hvd.first():
            data = datasets.load(folder, download=True)

    Args:
        per_node: Let one rank of each node go first, for files that nodes do not share.

    Raises:
        Exception: The block has failed on a rank that goes first: its exception, on every rank. One
            that cannot be pickled is a RuntimeError on the other ranks. They do not run the block.
        HorovodInternalError: A rank has ended.
        ValueError: It is within a block with another ``per_node``.
    """
    running = _running.get()
    if running is not None:
        if per_node != running:
            raise ValueError(
                f"rank {world.rank()}: hvd.first(per_node={per_node}) is within a block of "
                f"hvd.first(per_node={running}), in which the ranks cannot wait for each other: "
                "give both the same, or put one behind the other"
            )
        yield
        return
    token = _running.set(per_node)
    try:
        yield from _in_turn(per_node)
    finally:
        _running.reset(token)


def _in_turn(per_node: bool) -> Iterator[None]:
    """Yield once: before all other ranks, or when those that go first have succeeded."""
    has_run = False
    while True:
        failure = None
        if not has_run and (world.local_rank() if per_node else world.rank()) == 0:
            has_run = True
            try:
                yield
            except Exception as error:  # the other ranks wait for the outcome
                failure = error
        node = world.node_index() if per_node else 0
        own = node, has_run, failure and portable(failure)
        gathered = collectives.allgather_object(own, name="first")
        found = failure or next((each for _, _, each in gathered if each is not None), None)
        if found is not None:
            raise found
        done = {each for each, ran, _ in gathered if ran}
        if all(each in done for each, _, _ in gathered):
            break
        # Whoever has run the block on a node has died, and all ranks see that: the next one does.
    if not has_run:
        yield


def portable(error: Exception) -> Exception:
    """Return an error that other ranks can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank {world.rank()} has failed: {type(error).__name__}: {error}")
    return error
