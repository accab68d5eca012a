"""A running mpirun: the signals it gets, the first rank that fails, the exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from hvdlite.launch.errors import NOT_EXECUTABLE, LaunchError
from hvdlite.launch.rank import describe, die_with_parent, shell_code

_TICK = 0.05
_MESSAGE_SIZE = select.PIPE_BUF

# Seconds in which mpirun passes on what the ranks wrote last.
_LAST_LINES = 0.3

# After how many seconds mpirun gets which signal, by what has happened. A Ctrl-C at a
# terminal reaches mpirun without help, and a second signal makes it drop everything; an
# mpirun that does not end is killed, and the processes around the ranks follow it.
_Plan = Sequence[tuple[float, signal.Signals]]
_FAILED: _Plan = ((3.0, signal.SIGTERM), (6.0, signal.SIGKILL))
_INTERRUPTED: _Plan = ((1.0, signal.SIGTERM), (4.0, signal.SIGKILL))
_TERMINATED: _Plan = ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))
_ON_SIGNAL = {
    signal.SIGINT: _INTERRUPTED,
    signal.SIGTERM: _TERMINATED,
    signal.SIGHUP: _TERMINATED,
}


class Failure(NamedTuple):
    """A rank that failed.

    Attributes:
        code: its exit code, 128 + n for signal n.
        text: which rank, where and how.
    """

    code: int
    text: str


class Inbox:
    """Where the ranks of this host report a failure: a FIFO that only the user can open.

    Attributes:
        path: its name, for the ranks.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "failures")
        os.mkfifo(self.path, 0o600)
        # Held open for writing too, or it would be at its end whenever no rank has it open.
        self._file = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def wait(self, seconds: float) -> Failure | None:
        """The next failure, if one comes in time."""
        if not select.select([self._file], [], [], seconds)[0]:
            return None
        line = os.read(self._file, _MESSAGE_SIZE).decode().partition("\n")[0]
        code, _, text = line.partition(" ")
        return Failure(int(code), text)

    def close(self) -> None:
        """Close it; its folder's owner removes it."""
        os.close(self._file)


@contextlib.contextmanager
def inbox() -> Iterator[Inbox]:
    """An inbox for one job."""
    with tempfile.TemporaryDirectory(prefix="hvdliterun-") as folder:
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
    with _signals() as received:
        process = _start(arguments, environment)
        failure = _watch(process, box, received, quiet_end)
    if received:
        return 128 + received[0]
    if failure:
        say(failure.text)
        return failure.code
    if process.returncode:
        say(describe("mpirun", process.returncode))
    return shell_code(process.returncode)


def say(text: str) -> None:
    """Print one line to the user, on standard error."""
    print(f"hvdliterun: {text}", file=sys.stderr, flush=True)


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    launcher = os.getpid()

    def follow_launcher() -> None:
        die_with_parent(launcher, signal.SIGTERM)

    try:
        return subprocess.Popen(arguments, env=environment, preexec_fn=follow_launcher)
    except OSError as error:
        raise LaunchError(f"{arguments[0]}: {error.strerror}", NOT_EXECUTABLE) from None


def _watch(
    process: subprocess.Popen[bytes],
    box: Inbox,
    received: Sequence[signal.Signals],
    quiet_end: signal.Signals | None,
) -> Failure | None:
    """Wait for mpirun, see to it that it ends when it should; return the first failure."""
    failure: Failure | None = None
    ending: _Ending | None = None
    interrupted = False
    while process.poll() is None:
        news = box.wait(_TICK)
        if news and not failure:
            failure = news
            quietly = ((_LAST_LINES, quiet_end),) if quiet_end else ()
            ending = ending or _Ending(process, (*quietly, *_FAILED))
        if received and not interrupted:
            interrupted = True
            ending = _Ending(process, _ON_SIGNAL[received[0]])
        if ending:
            ending.advance()
    return failure or box.wait(0)


class _Ending:
    """Signals to a process, each at its time."""

    def __init__(self, process: subprocess.Popen[bytes], plan: _Plan) -> None:
        now = time.monotonic()
        self._process = process
        self._steps = [(now + delay, number) for delay, number in plan]

    def advance(self) -> None:
        while self._steps and time.monotonic() >= self._steps[0][0]:
            self._process.send_signal(self._steps.pop(0)[1])


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that end a program instead of obeying them."""
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {number: signal.signal(number, note) for number in _ON_SIGNAL}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
