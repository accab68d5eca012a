"""A running mpirun: the signals it gets, the first rank that fails, the exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
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
from hvdlite.launch import rank, status
from hvdlite.launch.hosts import Host
from hvdlite.launch.mpirun import ONE_HOST, Mpirun, exported
from hvdlite.launch.server import Server
from hvdlite.observe import protocol
from hvdlite.observe.protocol import Part
from hvdlite.observe.status import ASKING, SIGNAL

_TICK = 0.05

# After how many seconds mpirun gets which signal, by what has happened. An mpirun that does
# not end is killed, and the processes around the ranks follow it.
_Plan = Sequence[tuple[float, signal.Signals]]
_GOES_ON: _Plan = ()
_FAILED: _Plan = ((4.0, signal.SIGTERM), (8.0, signal.SIGKILL))
_ENDED: _Plan = ((0.0, signal.SIGTERM), (4.0, signal.SIGKILL))
# A Ctrl-C reaches mpirun without our help, and a second signal makes it drop everything.
_ENDED_FROM_TERMINAL: _Plan = ((2.5, signal.SIGTERM), (6.0, signal.SIGKILL))

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Both ask what the ranks do; after the report, the second one (Ctrl-\ at a terminal) ends the job.
_ASKING = (SIGNAL, signal.SIGQUIT)


class Job(NamedTuple):
    """The processes that mpirun is to start, and how.

    Attributes:
        hosts: where the ranks run; empty: here, or wherever the batch system says.
        is_here: whether all of them are this host.
        output: where their output goes, as for `hvdlite.launch.rank`.
    """

    program: Mpirun
    hosts: Sequence[Host]
    is_here: bool
    command: Sequence[str]
    settings: Mapping[str, str]
    output: str = ""
    arguments: Sequence[str] = ()
    verbose: bool = False


class End(NamedTuple):
    """How a job ended.

    Attributes:
        text: which rank failed first, and how; empty: none did, or a signal to this process ended
            the job.
        state: the parts of the state that only this process has, and that another run goes on
            with: of ranks that have stopped, or the one given where not all ranks have had it.
    """

    code: int
    text: str
    state: Sequence[Part] = ()


def run(job: Job, server: Server, check: Callable[[], object] = lambda: None) -> End:
    """Do what `follow` does, and return how the job ended."""
    code, received = follow(job, server, check)
    if received:
        return End(128 + received, "")
    if code:  # Open MPI may have seen it, and ended the job, within the first second
        server.check_start(0.0)
    if server.exited:
        return End(server.exited.code, server.exited.text, server.state)
    # Without those of spares, which end when they find no rank that has the state.
    codes = [death.code for death in server.deaths if death.rank < server.ranks]
    if codes and not server.left:
        return End(codes[-1], "no rank is left", server.state)
    text = rank.describe("mpirun", code) if code else ""
    return End(rank.shell_code(code), text, server.state)


def follow(
    job: Job, server: Server, check: Callable[[], object] = lambda: None, captures: bool = False
) -> tuple[int, signal.Signals | None]:
    """Run mpirun to its end, and end it when a rank or a signal demands it.

    Args:
        check: called again and again; what it raises ends the job.
        captures: whether mpirun reads nothing, and the server shows what it prints.

    Returns:
        mpirun's exit code, negative for a signal, and the signal that this process got meanwhile.

    Raises:
        StartError: mpirun cannot be started.
    """
    # Those that read from a terminal must be in its group, the launcher's.
    at_terminal = not captures and os.isatty(0)
    asking = Path(server.folder, ASKING)
    spawns = job.settings.get(*ONE_HOST) != ONE_HOST[1]
    quiet_end = job.program.quiet_end
    with _signals() as (received, asked):
        process = _start(job, server, at_terminal, captures)
        if process.stdout and process.stderr:
            server.read(process.stdout, protocol.OUT)
            server.read(process.stderr, protocol.ERR)
        plan, steps = _GOES_ON, list(_GOES_ON)
        begun, reported, stage = 0.0, 0, (False, False)
        try:
            while process.poll() is None:
                server.serve(_TICK)
                server.check_start()
                check()
                are_connected = stage[1] or server.are_connected()
                last, stage = stage, (bool(server.hosts), are_connected)
                if job.is_here and (stage != last or not server.hosts):
                    job.program.close_ports(process.pid, stage[0], stage[1] and not spawns)
                if asked or asking.exists():
                    is_last = signal.SIGQUIT in asked
                    asked.clear()
                    server.clear()
                    say(status.report(server.folder))
                    asking.unlink(missing_ok=True)
                    received += [signal.SIGQUIT] * is_last
                for death in server.deaths[reported:]:
                    reported += 1
                    others = server.ranks + server.spares - reported - len(server.left)
                    server.clear()
                    say(f"{death.text}; the other ranks go on" if others else death.text)
                if server.wants_end and quiet_end and not received:
                    process.send_signal(quiet_end)
                    quiet_end = None
                if (now := _plan(server, received, at_terminal)) is not plan:
                    plan, steps, begun = now, list(now), time.monotonic()
                while steps and time.monotonic() >= begun + steps[0][0]:
                    process.send_signal(steps.pop(0)[1])
            server.finish()
        finally:
            _end(process)
    return process.returncode, received[0] if received else None


def say(text: str) -> None:
    """Print one line to the user, on standard error."""
    print(f"hvdliterun: {text}", file=sys.stderr, flush=True)


def _start(job: Job, server: Server, at_terminal: bool, captures: bool) -> subprocess.Popen[bytes]:
    """Start mpirun; for the arguments see `follow`."""
    needed = job.program.settings(os.geteuid() == 0, job.is_here, server.folder)
    environment = {**needed, **job.settings}
    if captures:
        environment[rank.STDIN] = rank.NOTHING
    secret = {protocol.KEY: server.key.hex()} if server.key else {}
    around = [sys.executable, "-I", "-S", rank.__file__, server.address, job.output]
    arguments = job.program.arguments(
        server.ranks + server.spares,
        job.hosts,
        [*around, *job.command],
        exported=[] if job.is_here else exported({**environment, **secret}),
        more=job.arguments,
    )
    if job.verbose:
        new = environment.items() - os.environ.items()
        say(shlex.join([*(f"{name}={value}" for name, value in sorted(new)), *arguments]))
    launcher = os.getpid()

    def follow_launcher() -> None:
        rank.die_with_parent(launcher, signal.SIGTERM)
        if at_terminal:
            # It would end before the ranks have answered.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        else:
            # A batch system signals a whole group; mpirun must get the signal once only.
            os.setpgid(0, 0)

    output = subprocess.PIPE if captures else None
    try:
        return subprocess.Popen(
            arguments,
            env={**environment, **secret},
            preexec_fn=follow_launcher,
            stdin=subprocess.DEVNULL if rank.STDIN in environment else None,
            stdout=output,
            stderr=output,
        )
    except OSError as error:
        text = f"{arguments[0]}: {error.strerror}"
        raise StartError(text, StartError.NOT_EXECUTABLE) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job that nobody waits for any more."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDED[-1][0])
        process.kill()
        process.wait()


def _plan(server: Server, received: Sequence[signal.Signals], at_terminal: bool) -> _Plan:
    """Return how mpirun is to be ended by what has happened so far."""
    if received:
        from_terminal = received[0] == signal.SIGINT and at_terminal
        return _ENDED_FROM_TERMINAL if from_terminal else _ENDED
    return _FAILED if server.exited else _GOES_ON


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
