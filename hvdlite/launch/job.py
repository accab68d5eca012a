"""A running mpirun: the signals it gets, the first rank that fails, the exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hvdlite.errors import StartError
from hvdlite.launch.mpirun import ONE_HOST
from hvdlite.launch.rank import STDIN, describe, die_with_parent, shell_code
from hvdlite.launch.server import Server
from hvdlite.launch.status import Inquiry
from hvdlite.observe.protocol import Part
from hvdlite.observe.status import ASKING, SIGNAL

_TICK = 0.05

ClosePorts = Callable[[int, bool, bool], None]

# After how many seconds mpirun gets which signal, by what has happened. An mpirun that does
# not end is killed, and the processes around the ranks follow it.
_Plan = Sequence[tuple[float, signal.Signals]]
_FAILED: _Plan = ((4.0, signal.SIGTERM), (8.0, signal.SIGKILL))
_ENDED: _Plan = ((0.0, signal.SIGTERM), (4.0, signal.SIGKILL))
# A Ctrl-C reaches mpirun without our help, and a second signal makes it drop everything.
_ENDED_FROM_TERMINAL: _Plan = ((2.5, signal.SIGTERM), (6.0, signal.SIGKILL))

# Exit codes of a wrong command line (Python, argparse), and of a program that cannot be started.
_HOPELESS = (StartError.USAGE, StartError.NOT_EXECUTABLE, StartError.NOT_FOUND)

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Both ask what the ranks do; after the report, the second one (Ctrl-\ at a terminal) ends the job.
_ASKING = (SIGNAL, signal.SIGQUIT)


class End(NamedTuple):
    """How a job ended.

    Attributes:
        code: its exit code.
        text: which rank failed first, and how; empty: none did, or a signal to this process ended
            the job.
        state: the parts of the state that only this process has, and that another run goes on
            with: of ranks that have stopped, or the one given where not all ranks have had it.
    """

    code: int
    text: str
    state: Sequence[Part] = ()

    @property
    def may_succeed_again(self) -> bool:
        """Return whether the same command may succeed if it is started once more."""
        return bool(self.text) and self.code not in _HOPELESS


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    server: Server,
    quiet_end: signal.Signals | None,
    check: Callable[[], object] = lambda: None,
    close_ports: ClosePorts | None = None,
) -> End:
    """Do what `follow` does, and return how the job ended."""
    code, received = follow(
        arguments,
        environment,
        server,
        quiet_end,
        at_terminal=os.isatty(0),
        streams=(subprocess.DEVNULL if STDIN in environment else None, None, None),
        check=check,
        close_ports=close_ports,
    )
    if received:
        return End(128 + received, "")
    if server.exited:
        return End(server.exited.code, server.exited.text, server.state)
    # Without those of spares, which end when they find no rank that has the state.
    codes = [death.code for death in server.deaths if death.rank < server.ranks]
    if codes and not server.left:
        return End(codes[-1], "no rank is left", server.state)
    return End(shell_code(code), describe("mpirun", code) if code else "", server.state)


def follow(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    server: Server,
    quiet_end: signal.Signals | None,
    at_terminal: bool,
    streams: Sequence[int | None] = (None, None, None),
    check: Callable[[], object] = lambda: None,
    close_ports: ClosePorts | None = None,
) -> tuple[int, signal.Signals | None]:
    """Run mpirun to its end, and end it when a rank or a signal demands it.

    Args:
        arguments: mpirun's command line.
        environment: its environment.
        server: where the ranks report.
        quiet_end: the signal on which this mpirun ends a job without a word, if any.
        at_terminal: whether it reads from a terminal, for which it must be in the launcher's group.
        streams: its standard input, output and error, as `subprocess.Popen` takes them.
        check: called again and again; what it raises ends the job.
        close_ports: `hvdlite.launch.mpirun.Mpirun.close_ports`; None: the job needs them.

    Returns:
        mpirun's exit code, negative for a signal, and the signal that this process got meanwhile.

    Raises:
        StartError: mpirun cannot be started.
    """
    with _signals() as (received, asked):
        process = _start(arguments, environment, at_terminal, streams)
        steps: list[tuple[float, signal.Signals]] = []
        inquiry: Inquiry | None = None
        asking = os.path.join(server.folder, ASKING)
        try:
            ending, failed, told, is_last, begun = False, False, 0, False, False
            spawns = environment.get(ONE_HOST[0], ONE_HOST[1]) != ONE_HOST[1]
            while process.poll() is None:
                server.serve(_TICK)
                check()
                if close_ports is not None:
                    has_ranks, are_connected = bool(server.hosts), server.are_connected()
                    if are_connected or not begun:
                        close_ports(process.pid, has_ranks, are_connected and not spawns)
                        begun = has_ranks
                    close_ports = None if are_connected else close_ports
                if inquiry is None and (asked or os.path.exists(asking)):
                    is_last = signal.SIGQUIT in asked
                    asked.clear()
                    inquiry = Inquiry(server.folder)
                if inquiry is not None and inquiry.is_over():
                    server.clear()
                    say(inquiry.report())
                    inquiry = None
                    Path(asking).unlink(missing_ok=True)
                    if is_last:
                        received.append(signal.SIGQUIT)
                if received and not ending:
                    ending = True
                    from_terminal = received[0] == signal.SIGINT and at_terminal
                    steps = _from_now(_ENDED_FROM_TERMINAL if from_terminal else _ENDED)
                if server.exited and not failed and not ending:
                    failed = True
                    steps = _from_now(_FAILED)
                for death in server.deaths[told:]:
                    told += 1
                    others = server.ranks + server.spares - told - len(server.left)
                    server.clear()
                    say(f"{death.text}; the other ranks go on" if others else death.text)
                if server.wants_end and quiet_end and not ending:
                    process.send_signal(quiet_end)
                    quiet_end = None
                while steps and time.monotonic() >= steps[0][0]:
                    process.send_signal(steps.pop(0)[1])
            server.finish()
        finally:
            _end(process)
    return process.returncode, received[0] if received else None


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
        if at_terminal:
            # It would end before the ranks have answered.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        else:
            # A batch system signals a whole group; mpirun must get the signal once only.
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
        text = f"{arguments[0]}: {error.strerror}"
        raise StartError(text, StartError.NOT_EXECUTABLE) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job that nobody waits for any more."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_ENDED[-1][0])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _from_now(plan: _Plan) -> list[tuple[float, signal.Signals]]:
    now = time.monotonic()
    return [(now + delay, number) for delay, number in plan]


@contextlib.contextmanager
def _signals() -> Iterator[tuple[list[signal.Signals], list[signal.Signals]]]:
    """Collect the signals that end a program, and those that ask what it does.

    Only the main thread gets signals; in another there is nothing to collect.
    """
    received: list[signal.Signals] = []
    asked: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received, asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        (asked if number in _ASKING else received).append(signal.Signals(number))

    previous = {number: signal.signal(number, note) for number in (*_HANDLED, *_ASKING)}
    try:
        yield received, asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
