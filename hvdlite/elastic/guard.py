"""Guard: runs a lane's rounds, in which deaths are noticed, and holds them during a recovery."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from hvdlite.engine.lane import Lane, describe_error
from hvdlite.errors import HorovodInternalError, RankGoneError

if TYPE_CHECKING:
    from hvdlite.elastic.recovery import Recovery


class LaneState(NamedTuple):
    """The progress of a lane when a rank has died.

    Attributes:
        confirmed: The number of outcomes that all ranks have.
        in_doubt: Whether this rank has a further one, which other ranks may lack.
        failure: Why this rank cannot continue in it; None: it can.
    """

    confirmed: int
    in_doubt: bool
    closed: bool
    failure: str | None = None


class Guard:
    """The guard of a lane."""

    def __init__(self, lane: Lane, recovery: Recovery) -> None:
        self._lane = lane
        self._recovery = recovery
        self._waits = False  # for the recovery, in a round

    def run(self) -> None:
        """Run a round, and recover from the death of ranks in it."""
        recoveries = self._recovery.recoveries
        try:
            self._recovery.check()  # also where no round waits long enough to do so
            self._lane.rounds.run()
        except Exception as error:
            is_recoverable = self._is_recoverable(error)
            if not is_recoverable:
                self._lane.failure = describe_error(error)
                with contextlib.suppress(Exception):
                    self._lane.transport.leave()
            self.revoke()  # others may be in this round, and wait for this rank
            self._waits = True
            try:  # if it is not recoverable, the recovery fails, which all ranks notice
                self._recovery.recover(error, recoveries)
            except HorovodInternalError:
                if is_recoverable:
                    raise
                raise error from None
            finally:
                self._waits = False

    def _is_recoverable(self, error: Exception) -> bool:
        """Return whether an error of a round says that a rank has died."""
        if isinstance(error, OSError):  # the memory of a process that has gone, perhaps
            with contextlib.suppress(RankGoneError):
                self._lane.transport.check_alive()
                return False
            return True
        return self._recovery.is_about_death(error)

    def hold(self) -> LaneState:
        """Hold the lane until `let_go`, and return its state.

        A thread that runs rounds notices the death itself or in `Recovery.check`, and then waits.
        """
        lane = self._lane
        lane.hold(lambda: self._waits)
        failure = "arrays lie on a GPU" if lane.is_on_device else lane.failure
        rounds = lane.rounds
        return LaneState(rounds.confirmed, rounds.in_doubt is not None, rounds.closed, failure)

    def let_go(self) -> None:
        """Let the lane's rounds run again."""
        self._waits = False  # else a further `hold` might not wait for the thread
        self._lane.let_go()

    def revoke(self) -> None:
        """End the other ranks' calls, too."""
        if not self._lane.is_released:
            self._lane.transport.revoke()
