"""A running mpirun: the signals it gets, the first rank that fails, the exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple, Protocol

from hvdlite.launch.errors import NOT_EXECUTABLE, LaunchError
from hvdlite.launch.rank import END_JOB, describe, die_with_parent, shell_code

_TICK = 0.05

# After how many seconds mpirun gets which signal, by what has happened. An mpirun that does
# not end is killed, and the processes around the ranks follow it.
_Plan = Sequence[tuple[float, signal.Signals]]
_FAILED: _Plan = ((4.0, signal.SIGTERM), (8.0, signal.SIGKILL))
_ENDED: _Plan = ((0.0, signal.SIGTERM), (4.0, signal.SIGKILL))
# A Ctrl-C reaches mpirun without our help, and a second signal makes it drop everything.
_ENDED_FROM_TERMINAL: _Plan = ((2.5, signal.SIGTERM), (6.0, signal.SIGKILL))

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Failure(NamedTuple):
    """A rank that failed.

    Attributes:
        code: its exit code, 128 + n for signal n.
        text: which rank, where and how.
    """

    code: int
    text: str


class Ending(NamedTuple):
    """How a job ended.

    Attributes:
        code: mpirun's exit code, negative for a signal.
        failure: the first rank that failed.
        received: the signal that the launcher got meanwhile.
    """

    code: int
    failure: Failure | None
    received: signal.Signals | None


class Reports(Protocol):
    """Where the ranks report."""

    def wait(self, seconds: float) -> list[str]:
        """The messages that came, or none after so many seconds."""

    def finish(self) -> list[str]:
        """The messages that are still there when the ranks have ended."""


class Inbox:
    """Where the ranks of this host report: a FIFO that only this user can open.

    Attributes:
        path: its name, for the ranks.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "failures")
        os.mkfifo(self.path, 0o600)
        # Held open for writing too, or it would be at its end whenever no rank has it open.
        self._file = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._unfinished = b""

    def wait(self, seconds: float) -> list[str]:
        """The messages that came, or none after so many seconds."""
        if not select.select([self._file], [], [], seconds)[0]:
            return []
        received = self._unfinished + os.read(self._file, select.PIPE_BUF)
        *lines, self._unfinished = received.split(b"\n")
        return [line.decode() for line in lines]

    def finish(self) -> list[str]:
        """The messages that are still there when the ranks have ended."""
        return self.wait(0)

    def close(self) -> None:
        """Close it; whoever made its folder removes that."""
        os.close(self._file)


def folder_of_a_job(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder for a job, which only this user can open, to be removed at its end."""
    # What ranks have left running may still write into their folders in it.
    return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)


@contextlib.contextmanager
def inbox() -> Iterator[Inbox]:
    """An inbox for one job."""
    with folder_of_a_job("hvdliterun-") as folder:
        box = Inbox(folder)
        try:
            yield box
        finally:
            box.close()


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    box: Inbox,
    quiet_end: signal.Signals | None,
) -> int:
    """Run mpirun to its end, say which rank failed first, and return the job's exit code.

    Args:
        arguments: mpirun's command line.
        environment: its environment.
        box: where the ranks report.
        quiet_end: the signal on which this mpirun ends a job without a word, if any.

    Raises:
        LaunchError: mpirun cannot be started.
    """
    ending = follow(arguments, environment, box, quiet_end, at_terminal=os.isatty(0))
    if ending.received:
        return 128 + ending.received
    if ending.failure:
        say(ending.failure.text)
        return ending.failure.code
    if ending.code:
        say(describe("mpirun", ending.code))
    return shell_code(ending.code)


def follow(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    box: Reports,
    quiet_end: signal.Signals | None,
    at_terminal: bool,
    streams: Sequence[int | None] = (None, None, None),
) -> Ending:
    """Run mpirun to its end, and see to it that it ends when it should.

    Args:
        arguments: mpirun's command line.
        environment: its environment.
        box: where the ranks report.
        quiet_end: the signal on which this mpirun ends a job without a word, if any.
        at_terminal: whether it reads from a terminal, for which it must be in the launcher's group.
        streams: its standard input, output and error, as `subprocess.Popen` takes them.

    Raises:
        LaunchError: mpirun cannot be started.
    """
    with _signals() as received:
        process = _start(arguments, environment, at_terminal, streams)
        watch = _Watch(process, box, quiet_end, at_terminal)
        try:
            code = watch.until_end(received)
        finally:
            _end(process)
    return Ending(code, watch.failure, received[0] if received else None)


def say(text: str) -> None:
    """Print one line to the user, on standard error."""
    print(f"hvdliterun: {text}", file=sys.stderr, flush=True)


def _start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    at_terminal: bool,
    streams: Sequence[int | None],
) -> subprocess.Popen[bytes]:
    launcher = os.getpid()

    def follow_launcher() -> None:
        die_with_parent(launcher, signal.SIGTERM)
        if not at_terminal:
            # What signals a whole group, as batch systems do, is to reach mpirun once.
            os.setpgid(0, 0)

    stdin, stdout, stderr = streams
    try:
        return subprocess.Popen(
            arguments,
            env=environment,
            preexec_fn=follow_launcher,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )
    except OSError as error:
        raise LaunchError(f"{arguments[0]}: {error.strerror}", NOT_EXECUTABLE) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no job behind when waiting for it was given up."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_ENDED[-1][0])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Watch:
    """Waits for mpirun, and sees to it that it ends when it should.

    Attributes:
        failure: the first rank that failed.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        box: Reports,
        quiet_end: signal.Signals | None,
        at_terminal: bool,
    ) -> None:
        self.failure: Failure | None = None
        self._process = process
        self._box = box
        self._quiet_end = quiet_end
        self._at_terminal = at_terminal
        self._steps: list[tuple[float, signal.Signals]] = []

    def until_end(self, received: Sequence[signal.Signals]) -> int:
        """Wait; ``received`` grows by the signals that the launcher gets."""
        interrupted = False
        while self._process.poll() is None:
            for message in self._box.wait(_TICK):
                self._take(message, interrupted)
            if received and not interrupted:
                interrupted = True
                on_terminal = received[0] == signal.SIGINT and self._at_terminal
                self._plan(_ENDED_FROM_TERMINAL if on_terminal else _ENDED)
            self._advance()
        for message in self._box.finish():
            self._take(message, interrupted)
        return self._process.returncode

    def _take(self, message: str, interrupted: bool) -> None:
        if message != END_JOB and self.failure is None:
            code, _, text = message.partition(" ")
            self.failure = Failure(int(code), text)
            if not interrupted:
                self._plan(_FAILED)
        elif message == END_JOB and self._quiet_end and not interrupted:
            self._steps.insert(0, (0.0, self._quiet_end))
            self._quiet_end = None

    def _plan(self, plan: _Plan) -> None:
        now = time.monotonic()
        self._steps = [(now + delay, number) for delay, number in plan]

    def _advance(self) -> None:
        while self._steps and time.monotonic() >= self._steps[0][0]:
            self._process.send_signal(self._steps.pop(0)[1])


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that end a program instead of obeying them.

    Only the main thread gets signals; in another there is nothing to collect.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {number: signal.signal(number, note) for number in _HANDLED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
