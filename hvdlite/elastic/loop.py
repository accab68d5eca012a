"""The training loop that returns to the last commit after a failure."""

from __future__ import annotations

import functools
import gc
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from hvdlite import collectives
from hvdlite.base.settings import Settings
from hvdlite.elastic import resizing, spares
from hvdlite.elastic.rendezvous import Rendezvous, reset
from hvdlite.elastic.spares import Message
from hvdlite.elastic.state import State, StopInterrupt
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import global_process_set
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt, RankGoneError, ranks_text
from hvdlite.world import membership, mpi, world

_log = logging.getLogger("hvdlite")
_NAMED = re.compile(r"\b(?:HorovodInternalError|RankGoneError|MismatchError): (.+)")

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
    Otherwise training cannot continue without that rank: the
    others raise ``RankGoneError``, which names it.

    After ``HVDLITE_ELASTIC_RETRIES`` (3) failures in a row without a commit between them, the next
    failure is raised.

    Args:
        func: the training function; its first argument is a `State`.
    """

    @functools.wraps(func)
    def wrapper(state: _State, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        engine = runtime.engine()
        settings = engine.settings
        pool, first_tag = spares.pool, 0
        holders = None if pool is None else pool.take_holders()
        if holders is not None:  # this is a spare, and the others have begun already
            for lane in engine.lanes:
                lane.accept()
        else:
            # It names missing ranks, unlike the steps below.
            collectives.barrier(name="elastic.start")
            # Messages of an earlier run may still lie on the pool's communicator.
            first_tag = 0 if pool is None else pool.reserve_tags(2)
        comm = world.current().comm.Dup() if pool is None else pool.world
        rendezvous = Rendezvous(mpi.load(), comm, settings.elastic_timeout, pool, first_tag)
        attempts = _Attempts(state, rendezvous, settings, holders or ())
        try:
            if holders is None:
                attempts.resume()
            else:
                resizing.connect()
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

    def resume(self) -> None:
        """Go on from the state of a run with another number of ranks, if there was one."""
        resets = resizing.resume(self._state)
        if resets is not None:
            self._resets, self._is_new = resets, True

    def until_done(self, train: Callable[[], _Result]) -> _Result:
        """Call the function until all ranks have returned from it together."""
        while True:
            try:
                if self._is_new:
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
