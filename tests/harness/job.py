"""A job of N ranks that runs tests and ends when a test hangs."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.harness import mpirun
from tests.harness.messages import SECONDS_TO_LEAVE, Report, Request

SECONDS_TO_START = 240.0
GRACE = 5.0
"""Seconds that the other ranks have to report after one has failed."""
GRACE_AFTER_DEATH = 1.0


class JobError(Exception):
    """A job did not start, or did not end well; the message has mpirun's output."""


class Job:
    """N ranks under one mpirun.

    Args:
        size: The number of ranks.
        env: Environment variables on top of the harness's.

    Raises:
        JobError: The ranks did not come up in time.
    """

    def __init__(self, size: int, env: Mapping[str, str] | None = None) -> None:
        self.size = size
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._pids: dict[int, int] = {}
        self._ranks: dict[int, Connection] = {}
        self._mpirun: subprocess.Popen[bytes] | None = None
        try:
            self._start(env)
        except BaseException:
            self.kill()
            raise

    def run(self, request: Request, timeout: float) -> list[Report]:
        """Run a test on all ranks; end the job unless all passed or all skipped it."""
        healthy = False
        try:
            offsets = [self._output(rank).stat().st_size for rank in range(self.size)]
            reports = self._collect(request, timeout)
            # After anything else the ranks may wait in different collectives.
            healthy = {report.outcome for report in reports} in ({"passed"}, {"skipped"})
            if not healthy:
                self._explain(reports)
            for report, offset in zip(reports, offsets, strict=True):
                report.output = _read(self._output(report.rank), offset)
        finally:
            if not healthy:
                self.kill()
        return reports

    def leave(self) -> None:
        """Tell the ranks that no test will follow; they leave within seconds."""
        for connection in self._ranks.values():
            connection.close()
        self._ranks.clear()

    def join(self) -> None:
        """Wait for the end of a job that is leaving."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(SECONDS_TO_LEAVE + 2)
        self.kill()

    def finish(self, timeout: float) -> None:
        """Let the ranks leave as a script does and wait for the end of the job.

        Raises:
            JobError: They did not leave in time, or with an exit code other than 0.
        """
        try:
            for connection in self._ranks.values():
                _send(connection, None)
            code = self._mpirun.wait(timeout)
        except subprocess.TimeoutExpired:
            stacks = "\n".join(f"rank {rank}, {text}" for rank, text in self._stacks().items())
            raise JobError(f"passed, but did not leave in {timeout:g} s\n{stacks}") from None
        else:
            if code:
                raise JobError(f"passed, but left with exit code {code}\n{self._written()}")
        finally:
            self.kill()

    def kill(self) -> None:
        """End the job now, and remove its files."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, env: Mapping[str, str] | None) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(self._folder / "socket")
            listener.bind(address)
            listener.listen(self.size)
            arguments = ("-m", "tests.harness.worker", address, self._folder)
            with open(self._folder / "mpirun", "wb") as log:
                self._mpirun = subprocess.Popen(
                    mpirun.command(self.size, *arguments),
                    env=mpirun.environment({**mpirun.own_memory(), **(env or {})}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            deadline = time.monotonic() + SECONDS_TO_START
            listener.settimeout(0.2)
            while len(self._ranks) < self.size:
                self._accept(listener)
                if time.monotonic() > deadline or self._mpirun.poll() is not None:
                    raise self._not_started()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            rank, pid = connection.recv()
        except (TimeoutError, EOFError, OSError):
            return
        self._ranks[rank], self._pids[rank] = connection, pid

    def _not_started(self) -> JobError:
        missing = sorted(set(range(self.size)) - set(self._ranks))
        return JobError(
            f"a job of {self.size} ranks did not start: ranks {missing} are missing, "
            f"mpirun's exit code is {self._mpirun.poll()}\n{self._written()}"
        )

    def _mpirun_output(self) -> str:
        return "\n".join(_read(self._folder / "mpirun").splitlines()[-30:])

    def _written(self) -> str:
        outputs = {rank: _read(self._output(rank)) for rank in range(self.size)}
        sections = [f"rank {rank} wrote:\n{text}" for rank, text in outputs.items() if text]
        return "\n".join([f"mpirun wrote:\n{self._mpirun_output()}", *sections])

    def _collect(self, request: Request, timeout: float) -> list[Report]:
        reports = {rank: Report(rank, "silent") for rank in range(self.size)}
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        deadline = time.monotonic() + timeout
        for connection in waiting:
            _send(connection, request)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), min(left, 0.5)):
                rank = waiting.pop(connection)
                reports[rank] = report = _receive(connection, rank)
                deadline = min(deadline, time.monotonic() + _grace(report.outcome))
            # A child that a rank forked may keep a dead rank's connection open.
            if self._mpirun.poll() is not None:
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_DEATH)
        return [reports[rank] for rank in range(self.size)]

    def _explain(self, reports: list[Report]) -> None:
        """Add the stacks of the ranks that have not reported, and end the job."""
        stacks = self._stacks([report.rank for report in reports if report.outcome == "silent"])
        for report in reports:
            if report.outcome == "silent":
                report.text = stacks[report.rank]
            elif report.outcome == "died" and (text := self._stack(report.rank)):
                report.outcome, report.text = "ended", text
        self._end()
        for report in reports:
            if report.outcome == "died":
                report.text = self._mpirun_output()

    def _stacks(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of running ranks, taken at nearly the same time."""
        ranks = range(self.size) if ranks is None else list(ranks)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(map(self._stack, ranks)):
            time.sleep(0.05)
        time.sleep(0.1)  # The first to be complete may not be the last to be written.
        none = "no stacks: the process is gone or does not answer"
        return {rank: self._stack(rank) or none for rank in ranks}

    def _end(self) -> None:
        self.alive = False
        if self._mpirun is not None:
            mpirun.end(self._mpirun)
        self.leave()

    def _output(self, rank: int) -> Path:
        return self._folder / f"output-{rank}"

    def _stack(self, rank: int) -> str:
        threads = _read(self._folder / f"stacks-{rank}").rstrip().split("\n\n")
        return "\n\n".join(text for text in threads if "in _receive\n" not in text)


def _send(connection: Connection, message: Request | None) -> None:
    # A rank that is gone is noticed where its answer is awaited.
    with contextlib.suppress(OSError):
        connection.send(message)


def _receive(connection: Connection, rank: int) -> Report:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return Report(rank, "died")


def _grace(outcome: str) -> float:
    return {"failed": GRACE, "died": GRACE_AFTER_DEATH}.get(outcome, math.inf)


def _read(path: Path, offset: int = 0) -> str:
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
