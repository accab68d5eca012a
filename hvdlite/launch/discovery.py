"""The hosts that an elastic job may use, as they come and go, and its number of ranks.

A job that is to change its size stops at a commit of ``hvd.elastic.run``: rank 0 hands its state to
the launcher, all ranks end, and mpirun starts the job again on the hosts that there are by then.
New processes cannot join a job that runs: the daemon of Open MPI 5.0.11 (PRRTE 3) on a host that
``MPI_Comm_spawn`` adds ends with a segmentation fault, and takes the job with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from hvdlite.errors import StartError
from hvdlite.launch import programs
from hvdlite.launch.hosts import Host, host_key, listed, parse_host, shortened
from hvdlite.launch.job import say
from hvdlite.launch.server import Server

_PERIOD = 1.0  # Horovod's
_SECONDS_TO_ANSWER = 60.0
_TICK = 0.1


@dataclass
class Discovery:
    """Calls a script again and again for the hosts that there are; without one, they are fixed.

    Attributes:
        script: a shell command that prints a host in each line, as ``name:slots`` or ``name``.
        slots: slots of a host that is printed without them.
    """

    hosts: Sequence[Host] = ()
    script: str = ""
    slots: int = 1
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep `hosts` up to date in a thread.

        Raises:
            StartError: the script fails the first time.
        """
        if not self.script:
            yield
            return
        self.hosts = self._ask()
        thread = threading.Thread(target=self._repeat, name="hvdlite discovery", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _repeat(self) -> None:
        reported = ""
        while not self._ended.wait(_PERIOD):
            try:
                self.hosts, failure = self._ask(), ""
            except StartError as error:
                failure = str(error)
            if failure and failure != reported and not self._ended.is_set():
                say(f"{failure}; the job keeps the hosts that it has")
            reported = failure

    def _ask(self) -> list[Host]:
        """Run the script, and return the hosts that it prints."""

        def look(seconds: float) -> None:
            if self._ended.is_set():
                raise StartError("the job has ended")

        what = f"--host-discovery-script {self.script}"
        own: Any = {"shell": True, "start_new_session": True}
        try:
            ended = programs.run(self.script, _SECONDS_TO_ANSWER, look, _TICK, _kill, **own)
        except OSError as error:  # no memory for a process, or no space for what it prints
            raise StartError(f"{what}: {error.strerror}") from None
        if ended.code is None:
            raise StartError(f"{what}: no answer within {_SECONDS_TO_ANSWER:.0f} s")
        if ended.code:
            last = (ended.err.strip().splitlines() or ["no message"])[-1]
            raise StartError(f"{what}: exit code {ended.code} ({shortened(last)})")
        form = "expected 'host:slots' or 'host'"
        return [
            parse_host(line, f"{what}: printed {shortened(line)!r}, {form}", self.slots)
            for line in filter(None, map(str.strip, ended.out.splitlines()))
        ]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the script, with the processes that it leaves behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Plan(NamedTuple):
    """The hosts of a run of the job, and its number of ranks, without spares."""

    hosts: list[Host]
    ranks: int


@dataclass
class Sizes:
    """Decides how many ranks a job has, and when it stops to have another number.

    Attributes:
        least: the job waits for more hosts when it has fewer ranks.
        most: the most ranks that it may have.
        spares: slots that it needs beside those of the ranks.
        seconds: the longest wait for hosts.
        cooldown: seconds for which a host on which a process has failed gets no other, doubled with
            each further failure there, and the most that they grow to; default: forever.
    """

    discovery: Discovery
    least: int
    most: int
    spares: int = 0
    seconds: float = 600.0
    cooldown: tuple[float, float] = (inf, inf)
    # For each host, its failures, and until when it gets no more processes.
    _failures: Counter[str] = field(default_factory=Counter, init=False)
    _until: dict[str, float] = field(default_factory=dict, init=False)
    _order: list[str] = field(default_factory=list, init=False)
    # The hosts on which a process has ever started.
    _proven: set[str] = field(default_factory=set, init=False)
    # The number of ranks on each host when they were last counted; before that, slots of the plan.
    _running: Counter[str] = field(default_factory=Counter, init=False)

    def wait(self, most: int) -> Plan:
        """Return the next run's size, at most so many ranks, as soon as there are enough slots."""
        deadline = time.monotonic() + self.seconds
        while True:
            hosts = self._usable()
            slots = sum(host.slots for host in hosts)
            if slots >= self.least + self.spares:
                ranks = min(most, slots - self.spares)
                # Without hosts that get no process: mpirun fails if it cannot reach one of them.
                before = accumulate((host.slots for host in hosts), initial=0)
                hosts = [h for h, b in zip(hosts, before, strict=False) if b < ranks + self.spares]
                self._order = [host_key(host.name) for host in hosts]
                self._running = Counter({host_key(host.name): host.slots for host in hosts})
                return Plan(hosts, ranks)
            if time.monotonic() > deadline:
                raise StartError(
                    f"found {slots} of {self.least + self.spares} slots "
                    f"({listed(hosts) or 'no host'}) within {self.seconds:.0f} s "
                    "(--elastic-timeout); a host on which a process has "
                    "failed gets no more of them (--blacklist-cooldown-range)"
                )
            time.sleep(_TICK)

    def follow(self, server: Server) -> Callable[[], None]:
        """Return a function that has a run of the job stop when its size is to change."""
        known, due = 0, False

        def look() -> None:
            nonlocal known, due
            for death in server.deaths[known:]:
                known += 1
                for name in server.hosts.get(death.rank, ()):
                    self.exclude(host_key(name))
            if due or server.left:
                return
            dead = {death.rank for death in server.deaths}
            living = set(server.watching) - dead
            waiting = {*range(server.ranks + server.spares)} - dead - living
            if waiting & {*range(server.ranks)}:
                return  # Some have not begun yet.
            # Spares join at the next commit.
            size = min(len(living) + len(waiting), server.ranks)
            if self._is_other_size([server.hosts[rank] for rank in living], size):
                due = True
                server.ask_to_stop()

        return look

    def exclude(self, key: str) -> None:
        """Give a host no more processes for a while, after a failure there."""
        least, most = self.cooldown
        self._until[key] = time.monotonic() + min(least * 2.0 ** self._failures[key], most)
        self._failures[key] += 1

    def is_excluded(self, key: str) -> bool:
        """Return whether a host gets no more processes now."""
        return time.monotonic() < self._until.get(key, 0.0)

    def note_end(self, plan: Plan, server: Server, failed: bool) -> list[str]:
        """Note which hosts a run has started on; return those that get no processes for a while.

        These are, after a failure of mpirun itself, the hosts on which no process of any run has
        started: one that cannot be reached keeps mpirun from starting any process.
        """
        self._proven |= {host_key(name) for names in server.hosts.values() for name in names}
        if not failed or server.exited or not self._proven:
            return []
        bad = [host.name for host in plan.hosts if host_key(host.name) not in self._proven]
        for name in bad:
            self.exclude(host_key(name))
            del self._running[host_key(name)]
        return bad

    def _is_other_size(self, living: Sequence[Sequence[str]], size: int) -> bool:
        """Return whether the hosts have slots for more ranks than there are, or not for these.

        `living` has the names of each rank's host; `size` counts the spares that join, too.
        """
        known = {host_key(host.name) for host in self.discovery.hosts}
        self._running.clear()
        for names in living:
            keys = [host_key(name) for name in names]
            self._running[next((key for key in keys if key in known), keys[0])] += 1
        slots = {host_key(host.name): host.slots for host in self._usable()}
        if any(count > slots.get(key, 0) for key, count in self._running.items()):
            return True
        wanted = min(self.most, sum(slots.values()) - self.spares)
        return size < self.least or wanted > size

    def _usable(self) -> list[Host]:
        """Return the hosts with the slots that the job may use, known ones first.

        A host on which a process has failed has slots for the ranks that run there.
        """
        names = {host_key(host.name): host.name for host in self.discovery.hosts}
        slots: Counter[str] = Counter()
        for name, number in self.discovery.hosts:
            slots[host_key(name)] += number
        for key in filter(self.is_excluded, names):
            slots[key] = min(self._running[key], slots[key])
        keys = dict.fromkeys([*self._order, *names])
        return [Host(names[key], slots[key]) for key in keys if slots[key]]
