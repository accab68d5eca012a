"""Bounds on waiting for other ranks: the stall report and the stall shutdown."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdlite.base.interrupts import Interrupted, deferred, is_due, run_overdue
from hvdlite.base.settings import Settings
from hvdlite.engine.agreement import BOUND, LIKELY
from hvdlite.errors import HorovodInternalError, ranks_text
from hvdlite.observe import status

_log = logging.getLogger("hvdlite")
# A shorter wait is an ordinary one.
_LOOK_SECONDS = 0.5


@dataclass(eq=False)
class StallInspector:
    """Decides when a lane that waits for other ranks reports a stall, and when it gives up.

    Args:
        describe: Returns a text for what is waited for; called when a report is due.
        absent: Returns the ranks that have not come (None: not known).
        exempt: Returns whether the wait is exempt from the report and the shutdown.
        resumable: Returns whether the wait may be left, and resumed in another thread.
        supervise: See `hvdlite.engine.supervisor.Supervisor.check`.
        look: Called now and then in a wait that has lasted for a while.
    """

    settings: Settings
    describe: Callable[[], str]
    absent: Callable[[], list[int] | None] = lambda: None
    exempt: Callable[[], bool] = lambda: False
    resumable: Callable[[], bool] = lambda: False
    supervise: Callable[[], object] = lambda: None
    look: Callable[[], object] = lambda: None
    _reported: float = field(default=0.0, init=False)
    _abandoned: threading.Event = field(default_factory=threading.Event, init=False)

    def abandon(self) -> None:
        """End every wait, now and later."""
        self._abandoned.set()

    def check(self, elapsed: float) -> None:
        """Report the wait, or end it, if that is due.

        Args:
            elapsed: Seconds of this wait. A smaller value than before means a new wait.

        Raises:
            HorovodInternalError: The wait has been abandoned or has lasted too long.
            Interrupted: A signal handler is to run, and the wait is resumable.
        """
        if deferred and is_due():
            if self.resumable():
                raise Interrupted
            run_overdue()
        self.supervise()
        if elapsed > _LOOK_SECONDS:
            self.look()
        if elapsed < self._reported:
            self._reported = 0.0
        if self._abandoned.is_set():
            raise HorovodInternalError(
                f"shut down while waiting for other ranks in {self.describe()}; run the "
                "same steps on all ranks before hvd.shutdown()"
            )
        limit = self.settings.stall_shutdown_time_seconds
        if limit and elapsed > limit and not self.exempt():
            status.ask_launcher()  # while they still hang
            raise HorovodInternalError(
                f"waited {elapsed:.0f} s for {_ranks(self.absent())} in {self.describe()}; a "
                f"rank has ended, hangs, or runs different steps; {LIKELY}"
            )
        due = elapsed - self._reported >= self.settings.stall_check_time_seconds
        if due and not self.settings.stall_check_disable and not self.exempt():
            self._reported = elapsed
            absent = self.absent()
            if absent != []:  # else they have come meanwhile
                _log.warning(
                    "waited %.0f s for %s in %s; %s%s",
                    elapsed,
                    _ranks(absent),
                    self.describe(),
                    LIKELY,
                    "" if limit else BOUND,
                )


def _ranks(absent: list[int] | None) -> str:
    return ranks_text(absent) if absent else "other ranks"
