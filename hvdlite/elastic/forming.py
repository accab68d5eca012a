"""Forming: makes communicators in a job whose ranks may die meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.transport.mpi import forget_ended

_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
_Formed = TypeVar("_Formed")


class Forming:
    """A context in which all ranks make communicators and use them, or none does.

    All ranks enter and leave it together. An exception on one rank ends it on all of them, and is
    in `failure`.

    Open MPI 5.0.11 crashes when a communicator is revoked that another rank is still making. So the
    ranks agree on each before they use it.

    Args:
        outer: The forming that this one is a part of.

    Attributes:
        failure: Why it has failed; None: it has not.
        made: The communicators that `create` has made, also in its parts.
        undo: What is to be called if it fails in the end.
    """

    def __init__(self, MPI: Any, comm: Any, outer: Forming | None = None) -> None:  # noqa: N803
        self.failure: BaseException | None = None
        self._mpi = MPI
        self._comm = comm
        self.made: list[Any] = [] if outer is None else outer.made
        self.undo: ExitStack = ExitStack() if outer is None else outer.undo
        self._common: list[Any] = []
        self._has_ended = False

    def create(self, make: Callable[..., Any], *args: Any) -> Any:
        """Make a communicator; collective.

        Raises:
            RankGoneError: A rank could not make it, or has died.
        """
        failure, comm = None, None
        try:
            comm = make(*args)
            self.made.append(comm)
        except self._mpi.Exception as error:
            failure = error
        if not self._agree(failure is None):
            raise self._gone() from failure
        self._common.append(comm)
        return comm

    @contextmanager
    def part(self, comm: Any) -> Iterator[Forming]:
        """Return a forming of those ranks that a communicator has; its failure is one of this."""
        with Forming(self._mpi, comm, self) as inner:
            yield inner
        if inner.failure is not None:
            raise inner.failure

    def __enter__(self) -> Forming:
        with suppress(self._mpi.Exception):
            self._comm.Agree(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> bool:
        if error is not None:
            for comm in (*self._common, self._comm):  # others may wait for this rank in them
                with suppress(Exception):
                    comm.Revoke()
            # Open MPI 5.0.11 may end a collective without an error when a rank dies, and what has
            # arrived then cannot be unpickled, which raises anything.
            if not isinstance(error, Exception):
                return False
        is_formed = not self._has_ended and self._agree(error is None)
        self.failure = None if is_formed else error or self._gone()
        return True

    def _agree(self, here: bool) -> bool:
        """Return whether all ranks agree and none has died; the same on all ranks."""
        if not here:  # ends the calls of the others on it
            with suppress(self._mpi.Exception):
                self._comm.Revoke()
        try:
            agreed = bool(self._comm.Agree(int(here)))
        except self._mpi.Exception:  # on all ranks
            agreed = False
        self._has_ended = not agreed
        return agreed

    def _gone(self) -> RankGoneError:
        return RankGoneError(
            f"rank {self._comm.rank}: another rank has died, or could not communicate"
        )


def form_of_living(
    MPI: Any,  # noqa: N803
    comm: Any,
    build: Callable[[Any, Forming], _Formed],
    failed: list[Any],
) -> _Formed:
    """Build something of the living ranks, again if one of them dies meanwhile; collective.

    Args:
        comm: A communicator of all ranks, with those that have died.
        build: Called with a communicator of the living ranks, and with its forming.
        failed: Gets the communicators of attempts that have failed.

    Raises:
        HorovodInternalError: The ranks cannot communicate, although none has died.
    """
    failure = None
    while True:
        comm, size = comm.Shrink(), comm.size
        if failure is not None and comm.size == size:
            raise HorovodInternalError(
                f"rank {comm.rank}: the ranks cannot communicate, although none has died "
                f"({failure}); see what each of them says, start the job again (hvdliterun "
                "--restarts), and load the last checkpoint"
            ) from failure
        forming = Forming(MPI, comm)
        with forming.undo:
            with forming:
                formed = build(comm, forming)
            if forming.failure is None:
                forming.undo.pop_all()  # which calls none of them
                return formed
        failure = forming.failure
        failed += [comm, *forming.made]


def retire(MPI: Any, before: Sequence[Any], now: Sequence[Any]) -> list[Any]:  # noqa: N803
    """Free the communicators of the last call, and return those that the next one gets.

    Messages may be on their way to those of now, which a new communicator of the same number would
    receive, and threads may be reading their rank from the old world.
    """
    kept = [comm for comm in now if comm]  # not COMM_NULL
    if not forget_ended(MPI, before):  # MPI may still work on a collective over one of them
        return [*before, *kept]
    for comm in before:
        # Open MPI 5 does it without the other ranks, of which some have died.
        with suppress(MPI.Exception):
            comm.Free()
    return kept


def require_survival(MPI: Any, comm: Any) -> None:  # noqa: N803
    """Require that MPI survives the death of a rank."""
    goes_on = False
    if "Open MPI" in MPI.Get_library_version():
        # What `mpirun --with-ft ulfm` sets. Without it the functions exist, and wait forever.
        goes_on = os.environ.get(_FAULT_TOLERANCE, "0") not in ("0", "false", "no")
    else:
        with suppress(MPI.Exception, NotImplementedError):
            comm.Get_failed()
            goes_on = True
    if not goes_on:
        raise HorovodInternalError(
            f"rank {comm.rank}: HVDLITE_ELASTIC is 1, and this MPI ends when a rank dies; start "
            "the job by `hvdliterun --elastic` with Open MPI 5, or unset HVDLITE_ELASTIC"
        )
