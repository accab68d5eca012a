"""The training loop that returns to the last commit after a failure, in a new world."""

from __future__ import annotations

import functools
import gc
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from hvdlite import collectives
from hvdlite.base.settings import Settings
from hvdlite.elastic import resizing, spares
from hvdlite.elastic.gathering import Gathering
from hvdlite.elastic.recovery import Recovery
from hvdlite.elastic.spares import Message, Pool
from hvdlite.elastic.state import State, StopInterrupt
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt, RankGoneError, ranks_text
from hvdlite.world import membership, mpi, parts, world

_log = logging.getLogger("hvdlite")
_NAMED = re.compile(r"\b(?:HorovodInternalError|RankGoneError|MismatchError): (.+)")
_LEFT = 1  # a message's distance from the tag by which all ranks meet

_State = TypeVar("_State", bound=State)
_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")


def run(
    func: Callable[Concatenate[_State, _Rest], _Result],
) -> Callable[Concatenate[_State, _Rest], _Result]:
    """Make a training function continue after failures, from the last commit of its state.

    All ranks call the function together, after ``init()``::

        @hvd.elastic.run
        def train(state):
            while state.epoch < 10:
                ...
                state.epoch += 1
                state.commit()

        train(hvd.elastic.ObjectState(epoch=0))

    First all ranks get the state of rank 0. When ``HorovodInternalError`` ends the function on
    any rank, all ranks return to their last commit, form the world again, and call the function
    again. ``HostsUpdatedInterrupt`` does the same without returning to the commit. The ranks
    return together: if one fails at the very end, all repeat the last steps.

    When a rank dies under ``hvdliterun --elastic``, the others go on in the same step. At the next
    commit they form their world again, with spares (``--spares``) in the places of those that have
    died, and call the function again, so that reset callbacks and samplers adapt to the number of
    ranks. A spare gets the state of rank 0; before it calls the function, it must not communicate.
    Without ``--elastic``, training cannot continue without that rank: the others raise
    ``RankGoneError``, which names it.

    After ``HVDLITE_ELASTIC_RETRIES`` (3) failures in a row without a commit between them, the next
    failure is raised.

    Args:
        func: the training function; its first argument is a `State`.
    """

    @functools.wraps(func)
    def wrapper(state: _State, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        engine = runtime.engine()
        settings = engine.settings
        pool = spares.pool
        holders = None if pool is None else pool.take_holders()
        if holders is not None:  # this is a spare, and the others have begun already
            for lane in engine.lanes:
                lane.queue.accept()
        else:
            # It names missing ranks, unlike the steps below.
            collectives.barrier(name="elastic.start")
        rendezvous = Rendezvous(mpi.load(), settings.elastic_timeout, pool)
        attempts = _Attempts(state, rendezvous, settings, holders or ())
        try:
            result = attempts.until_done(lambda: func(state, *args, **kwargs))
            resizing.disconnect()
            return result
        except BaseException as error:
            if not attempts.has_handed_over:
                rendezvous.leave(f"{type(error).__name__}: {error}")
                runtime.note_lost_world(rendezvous.comm.rank, rendezvous.comm.size)
            raise

    return wrapper  # type: ignore[return-value]  # `state=` is Horovod's, if not func's


class _Attempts:
    """The calls of a training function.

    Attributes:
        has_handed_over: Whether this rank has stopped, and the job goes on with another number of
            ranks.
    """

    def __init__(
        self, state: State, rendezvous: Rendezvous, settings: Settings, holders: Sequence[int]
    ) -> None:
        self._state = state
        self._rendezvous = rendezvous
        # On a spare, until it has the state: the ranks that have it.
        self._holders = holders
        self._retries = settings.elastic_retries
        self._reset_limit = settings.elastic_reset_limit
        self._resets = 0
        self.has_handed_over = False
        self._is_new = False  # the world, for the state
        self._failures = 0  # in a row
        self._commits = state.commits  # when the last of them came
        self._skip_sync = False

    def until_done(self, train: Callable[[], _Result]) -> _Result:
        """Call the function until all ranks have returned from it together.

        First go on from the state of a run with another number of ranks, if there was one.
        """
        if self._holders:
            resizing.connect()
        elif (resets := resizing.resume(self._state)) is not None:
            self._resets, self._is_new = resets, True
        while True:
            try:
                if self._is_new:
                    membership.division = None  # the function has left no epoch by itself
                    self._state.on_reset()
                    # The old world's lanes, with memory as large as the gradients, are in cycles.
                    gc.collect()
                if self._is_new or self._holders:
                    self._number_alike()
                if self._skip_sync:
                    self._state.merge()
                else:
                    self._state.sync()
                self._check_holders()
                result = train()
                self._end_together()
                return result
            except HorovodInternalError as error:
                failure: HorovodInternalError | None = error
                message = self._fail(error)
            except StopInterrupt:
                self._count_reset()
                resizing.hand_over(self._state, self._resets)
                self.has_handed_over = True
                sys.exit(0)
            except HostsUpdatedInterrupt as update:
                failure = None
                message = Message(skip_sync=update.skip_sync)
            self._count_reset()
            is_spare = bool(self._holders)
            messages = reset(self._rendezvous, None if is_spare else message)
            if is_spare:
                self._holders = [rank for rank, each in enumerate(messages) if each is not None]
            self._learn(messages, failure)
            failure = None  # its traceback holds the old world
            self._is_new = True

    def _number_alike(self) -> None:
        """Have all ranks number alike what they make in the function from now on.

        Some may have made more than others before a failure, and a spare has made nothing there.
        """
        sets = [global_process_set, *runtime.process_sets().added]
        own = [each.labels for each in sets], dict(membership.counts)
        for labels, counts in collectives.allgather_object(own, "elastic.numbers"):
            for process_set, made in zip(sets, labels, strict=True):
                process_set.labels = max(made, process_set.labels)
            for key, count in counts.items():
                membership.counts[key] = max(count, membership.counts[key])

    def _check_holders(self) -> None:
        """Require, on a spare, that a rank that has the state still lives."""
        if self._holders and not {*world.current().ids} & {*self._holders}:
            raise RankGoneError(f"rank {world.rank()}: all ranks that had the state have died")
        self._holders = ()

    def _count_reset(self) -> None:
        """Count a new world; raise on all ranks if there have been too many."""
        self._resets += 1
        if self._reset_limit and self._resets > self._reset_limit:
            raise HorovodInternalError(
                f"rank {world.rank()}: the ranks have formed a new world {self._reset_limit} "
                "times, as often as HVDLITE_ELASTIC_RESET_LIMIT (--reset-limit) allows, and would "
                "have to again; raise it, or see what ends ranks"
            )

    def _end_together(self) -> None:
        if not world.is_initialized():  # the function has called shutdown()
            self._rendezvous.leave("it has finished")
            return
        collectives.barrier(name="elastic.end")
        self._rendezvous.close()

    def _fail(self, error: HorovodInternalError) -> Message:
        """Return to the last commit, and describe the failure to the others."""
        self._failures = self._failures + 1 if self._state.commits == self._commits else 1
        self._commits = self._state.commits
        self._state.restore()
        named = _NAMED.search(str(error))  # without the text that a framework has put around it
        return Message(error=named[1] if named else str(error), failures=self._failures)

    def _learn(self, messages: list[Message | None], failure: HorovodInternalError | None) -> None:
        """Evaluate the messages of all ranks; None: it has been a spare."""
        known = [message for message in messages if message is not None]
        self._skip_sync = None not in messages and all(message.skip_sync for message in known)
        # A rank may have failed once more than others, which had not begun yet.
        self._failures = max(message.failures for message in known)
        errors = {rank: message.error for rank, message in enumerate(known) if message.error}
        if not errors:
            _log.info("rank %d: the hosts have changed; training goes on", world.rank())
            return
        reasons = "; ".join(
            f"{ranks_text([rank for rank in errors if errors[rank] == error])}: {error}"
            for error in dict.fromkeys(errors.values())
        )
        if self._retries and self._failures > self._retries:
            raise HorovodInternalError(
                f"rank {world.rank()}: training has failed {self._failures} times in a row without "
                "a commit between, so it is not tried again (HVDLITE_ELASTIC_RETRIES="
                f"{self._retries}): {reasons}"
            ) from failure
        if world.rank() == 0:
            _log.warning("training failed and goes on from the last commit (%s)", reasons)


class Rendezvous(Gathering):
    """A meeting of all ranks with a time limit, even if ranks have died.

    Args:
        pool: forms a world without ranks that have died, and with spares (``hvdliterun
            --elastic``); None: all ranks must come.
    """

    def __init__(self, MPI: Any, timeout: float, pool: Pool | None) -> None:  # noqa: N803
        super().__init__(MPI, world.current().comm.Dup() if pool is None else pool.world)
        self.pool = pool
        self._timeout = timeout
        self._tag = 0 if pool is None else pool.reserve_tag()
        self._gone: str | None = None

    def exchange(self, message: Any) -> list[Any]:
        """Exchange messages with all ranks; return all messages by rank when all ranks have come.

        Where a pool forms worlds, ranks that have died bring None.

        Raises:
            RankGoneError: a rank has left, has not come in time, or has died without a pool.
        """
        deadline = time.monotonic() + self._timeout
        messages = self._exchange(message, deadline)
        if self.pool is None:
            # Else one whose time is up just now would leave others in a collective without it.
            self._exchange(None, deadline + self._timeout)
        return [messages.get(rank) for rank in range(self.comm.size)]

    def follow(self) -> None:
        """Go on with the world that the pool has formed, of those left and of spares."""
        assert self.pool is not None
        self.move(self.pool.world)
        self._tag = self.pool.reserve_tag()

    def leave(self, reason: str) -> None:
        """Tell all ranks that this one will not come any more, and why.

        If it leaves because another rank is gone, they learn of that rank.
        """
        reason = self._gone or f"rank {self.comm.rank} has left elastic training ({reason})"
        self.send(self._tag + _LEFT, reason)

    def close(self) -> None:
        """Free the communicator, unless it is the pool's; collective."""
        if self.pool is None:
            self.comm.Free()

    def _exchange(self, message: Any, deadline: float) -> dict[int, Any]:
        def watch(missing: Sequence[int]) -> None:
            self._check_dead()
            for rank in missing:
                if received := self.receive(rank, self._tag + _LEFT):
                    self._raise_gone(received[0])
            if time.monotonic() > deadline:
                self._raise_gone(
                    f"{ranks_text(missing)} did not come within {self._timeout:.0f} s "
                    "(HVDLITE_ELASTIC_TIMEOUT) to form the world again: it has ended, hangs or "
                    "still computes"
                )

        messages = self.meet(self._tag, message, watch)
        self._check_dead()
        return messages

    def _check_dead(self) -> None:
        for rank, error in self.dead.items() if self.pool is None else ():
            self._raise_gone(f"rank {rank} has died ({error})")

    def _raise_gone(self, what: str) -> NoReturn:
        self._gone = what
        raise RankGoneError(
            f"rank {self.comm.rank}: {what}, and a world without it cannot be formed yet; see "
            "what ended it, start the job again, and load the last checkpoint"
        )


def reset(rendezvous: Rendezvous, message: Message | None) -> list[Message | None]:
    """End the world of this rank and form one with all ranks that were in it; collective.

    Every rank comes here, since pending operations fail as soon as one rank has shut down.

    Args:
        rendezvous: over the ranks of the old world.
        message: this rank's, without its number and the process sets; None: it has been a spare.

    Returns:
        The messages of all ranks, by rank; None for those that were spares.

    Raises:
        RankGoneError: a rank has died, has left, or does not come.
    """
    rank, added = 0, list[ProcessSet]()
    if world.is_initialized():
        rank, added = world.rank(), runtime.process_sets().added
    process_sets = [each for each in added if each.ranks]  # not those whose ranks have all died
    virtual_size = parts.current.keep()
    runtime.leave_world()
    messages = rendezvous.exchange(message)
    if rendezvous.pool is not None:
        sets = [each.ranks for each in process_sets]
        supervisor = Recovery(message and message._replace(rank=rank, sets=sets), again=True)
        try:
            runtime.start(None, process_sets, virtual_size, supervisor)
        finally:  # the communicator before may have been freed
            rendezvous.follow()
        return supervisor.messages
    runtime.init(rendezvous.comm, process_sets, virtual_size)
    return messages
