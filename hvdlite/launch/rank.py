"""The process around each rank: it starts the command, waits, and names the rank that fails.

mpirun runs this file by its path (``python -I -S rank.py ADDRESS OUTPUT COMMAND...``), so that it
starts in a few milliseconds. ADDRESS is the launcher's, as `protocol.connect` takes it; empty:
there is none. OUTPUT is the folder for the ranks' output, ``-`` for the launcher, which prints it
for `hvdlite.run` and at a terminal (``-2``: standard error alone), or empty: mpirun passes the
output on.

A rank that calls ``shutdown()`` (at its exit, too) notes it before the other ranks can fail because
of it. The processes around those wait until the first rank has ended before they report, so that a
rank which ends by ``sys.exit(3)`` is the one that is named.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from types import ModuleType

if __name__ == "__main__":
    # The package itself would load numpy, and -S leaves that out.
    package = sys.modules["hvdlite"] = ModuleType("hvdlite")
    package.__path__ = [os.path.dirname(os.path.dirname(__file__))]

from hvdlite.base import memory_file
from hvdlite.launch import folders
from hvdlite.observe import protocol
from hvdlite.observe.protocol import LEAVING, NOTES, RANK, Channel, first_of, rank_here

# The names that process managers give to the number of ranks, and to the rank on its host.
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_OTHERS = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT, signal.SIGCHLD}
_WATCHED = _ENDING | _OTHERS

# The first signals of Open MPI's process manager when it ends a job, also for MPI_Abort.
_FIRST_SIGNS = _ENDING | {signal.SIGCONT}

# Seconds that mpirun has to read a rank's last lines, to pass them on, and to end the job.
_READ = 2.0
_PASS_ON = 0.3
_END = 8.0
# Seconds that a rank has to end after it began to leave.
_LEAVE = 5.0
# Seconds between two looks at the launcher. A manager has so many of them to end the job when the
# launcher has gone.
_LOOK, _ORPHANED = 1.0, 4

_MAX_READ = _MAX_LINE = 1 << 16

ELASTIC = "HVDLITE_ELASTIC"
"""The environment variable that is 1 where the other ranks go on when one has died."""
STDIN = "HVDLITE_LAUNCH_STDIN"
"""The environment variable with a position and the path of what rank 0 reads: mpirun hangs where
much is piped into it (prrte issue 2373)."""
NOTHING = f"0 {os.devnull}"
"""A value of it: Open MPI 5.0.11 never tells rank 0 that its own /dev/null is at its end."""
NODES = "HVDLITE_LAUNCH_NODES"
"""The environment variable with the first rank on each node, for ``--torch``; empty: nodes have
equal numbers."""
SHARED = "/dev/shm"
"""Where Open MPI puts the memory that the ranks of a host share."""

_SHARED_BYTES = 1 << 24  # of each rank
_SHARED_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
TO_LAUNCHER, ERRORS_TO_LAUNCHER = "-", "-2"
"""OUTPUT where the launcher prints what the ranks do, all of it or standard error."""
_FORWARDED = {TO_LAUNCHER: (1, 2), ERRORS_TO_LAUNCHER: (2,)}
_UNREACHABLE = 69  # EX_UNAVAILABLE
# This rank's folder in shared memory; empty: it has none.
_shared = ""


def main(arguments: Sequence[str]) -> None:
    """Run a rank's command, and end in the same way as it did."""
    global _shared
    address, output, *command = arguments
    manager = os.getppid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    if manager == 1:  # it has been killed before this process could tie its life to it
        os._exit(1)
    die_with_parent(manager, signal.SIGTERM)
    channel = _connect(address)
    numbers = _FORWARDED.get(output, ())
    forwarding = _Forwarding(channel, numbers) if numbers and channel else None
    folder = _own_folder(address)
    _shared = _own_shared_folder(folder)
    path = _make_notes(folder)
    notes = protocol.notes(path)
    this = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(this)
        if forwarding:
            forwarding.enter()
        os.environ[protocol.FOLDER] = folder
        os.environ[NOTES] = path
        if _shared:
            os.environ[_SHARED_VARIABLE] = _shared
        if NODES in os.environ:
            os.environ.update(torch_variables(int(first_of(_SIZE, "1")), manager))
        _run(command, "" if numbers else output, mask)
    if forwarding:
        forwarding.start()
    code, signs = _wait(child, manager, channel)
    _end_rest(code)
    last, has_met = notes[protocol.STEP], notes[protocol.MET]
    others_go_on = os.environ.get(ELASTIC) == "1" and has_met
    if code and not signs and not others_go_on:
        signs = _wait_for_earlier(notes, folder, manager)
    if code and not signs & _ENDING:
        rank = f"rank {first_of(RANK, '?')} on host {os.uname().nodename}"
        text = describe(rank, code) + (f" after step {last}" if last else "")
        if others_go_on:
            if not _send(channel, protocol.DEATH, str(shell_code(code)), text):
                os.write(2, f"hvdliterun: {text}; the other ranks go on\n".encode())
            _drain()
            code = -signal.SIGKILL  # for MPI, which takes no other end for a failure
        else:
            _report(channel, code, text, notes, under_way=bool(signs))
    else:
        notes[LEAVING] = 0  # so that others, which wait for it, report: it has not failed
    if code == 0:
        _send(channel, protocol.LEFT, "met" if has_met else "")
    if forwarding:
        forwarding.finish(_READ)
    _end(code)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent, known for certain, dies in any way."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def describe(who: str, code: int) -> str:
    """Say in one line how a process ended: its exit code, or minus the signal that killed it."""
    if code >= 0:
        return f"{who} exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""  # A real-time signal.
    return f"{who} was killed by signal {-code}{name}"


def shell_code(code: int) -> int:
    """Return the exit code as a shell counts it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def _connect(address: str) -> Channel | None:
    """Return the channel to the launcher; None: it runs on another host and listens on its own."""
    if not address:
        return None
    try:
        return protocol.connect(address, rank_here(), os.environ)
    except OSError as error:
        if os.sep in address:
            return None
        os.write(2, f"hvdlite: rank {first_of(RANK, '?')}: {error}\n".encode())
        os._exit(_UNREACHABLE)


class _Forwarding:
    """Sends the command's output to the launcher in whole lines.

    This process reads it, so that the last words of a rank that is killed arrive. mpirun's own
    forwarding would cut and mix the lines of several ranks, or hold a line until it is complete
    (ompi issue 12594): a progress bar would appear when it has ended. For a terminal, the beginning
    of a line is sent, too.
    """

    def __init__(self, channel: Channel, numbers: Sequence[int]) -> None:
        self._channel = channel
        self._pipes = {number: os.pipe() for number in numbers}
        self._is_live = os.environ.get(protocol.COLUMNS, "0") not in ("", "0")
        self._ended, self._end = os.pipe()
        self._reader = threading.Thread(target=self._forward, daemon=True)

    def enter(self) -> None:
        """Print into the pipes; called in the command's process."""
        for number, (_, writer) in self._pipes.items():
            os.dup2(writer, number)

    def start(self) -> None:
        """Begin to read the pipes; called in this process."""
        for _, writer in self._pipes.values():
            os.close(writer)
        self._reader.start()

    def finish(self, seconds: float) -> None:
        os.close(self._end)
        self._reader.join(seconds)

    def _forward(self) -> None:
        names = {1: protocol.OUT, 2: protocol.ERR}
        kinds = {reader: names[number] for number, (reader, _) in self._pipes.items()}
        unfinished = dict.fromkeys(kinds, b"")
        # Without a launcher nobody is left to read it.
        with contextlib.suppress(OSError):
            while kinds:
                ready = select.select([*kinds, self._ended], [], [])[0]
                # A child that the command has left behind may keep its pipes open.
                if ready == [self._ended]:
                    break
                for reader in set(ready) & set(kinds):
                    received = os.read(reader, _MAX_READ)
                    text = unfinished[reader] + received
                    unfinished[reader] = self._send_lines(kinds[reader], text, last=not received)
                    if not received:
                        del kinds[reader]
            for reader, kind in kinds.items():
                self._send_lines(kind, unfinished[reader], last=True)

    def _send_lines(self, kind: bytes, text: bytes, last: bool) -> bytes:
        lines, end, rest = text.rpartition(b"\n")
        if rest and (last or len(rest) > _MAX_LINE):
            lines, end, rest = text, b"\n", b""
        if end:
            self._channel.send(kind, lines)
        if rest and self._is_live:
            # The last picture of a bar; the next one's carriage return may be here already.
            begin = rest.rfind(b"\r", 0, len(rest) - 1)
            rest = rest[max(begin, 0) :]
            self._channel.send(protocol.LIVE, kind, rest)
        return rest


def _own_folder(address: str) -> str:
    """Make this rank's folder beside the launcher's socket; empty: on another host."""
    if launcher := os.path.dirname(address):
        with contextlib.suppress(OSError):
            folder = os.path.join(launcher, f"rank.{rank_here()}")
            os.mkdir(folder, mode=0o700)
            return folder
    return ""


def _own_shared_folder(folder: str) -> str:
    """Make a folder for this rank's memory that Open MPI shares; empty: it needs none.

    It is in this rank's `folder`, if there is one, where the shm mount is too small for all ranks
    (64 MB in a container): Open MPI would refuse it, and the ranks have no other way to each other.
    A rank leaves its file there when it is killed together with its manager.
    """
    if "OMPI_COMM_WORLD_RANK" not in os.environ or _SHARED_VARIABLE in os.environ:
        return ""
    folders.sweep(SHARED)
    with contextlib.suppress(OSError):
        mount, ranks = os.statvfs(SHARED), int(first_of(_LOCAL_SIZE, "1"))
        has_room = mount.f_bavail * mount.f_frsize >= ranks * _SHARED_BYTES
        return folders.make(SHARED if has_room or not folder else folder)[0]
    return ""


def _make_notes(folder: str) -> str:
    """Make a file for the rank's notes, in its folder or else in memory; return its path.

    A descriptor would not survive scripts that start the rank's program with theirs closed.
    """
    with contextlib.suppress(OSError):
        path, new = os.path.join(folder, NOTES), os.O_RDWR | os.O_CREAT
        file = os.open(path, new, 0o600) if folder else memory_file.create("hvdlite notes")
        os.posix_fallocate(file, 0, protocol.NOTES_SIZE)  # or a full disk would kill the rank
        return path if folder else f"/proc/{os.getpid()}/fd/{file}"
    return ""


def _wait_for_earlier(notes: memoryview, folder: str, manager: int) -> set[int]:
    """Wait for the ranks that began to leave before this one; return the manager's signs."""
    left = notes[LEAVING] or time.monotonic_ns()
    others = os.path.join(glob.escape(os.path.dirname(folder)), "rank.*", NOTES)
    deadline = time.monotonic() + _LEAVE
    while folder and any(0 < protocol.notes(each)[LEAVING] < left for each in glob.glob(others)):
        info = signal.sigtimedwait(_FIRST_SIGNS, 0.02)
        if os.getppid() != manager:
            _end_group()
        if info:
            return {info.si_signo}
        if time.monotonic() > deadline:
            break
    return set()


def torch_variables(size: int, manager: int) -> dict[str, str]:
    """Return what torchrun would set for this rank alone, in a job of so many processes.

    The manager is the process that has started those of this node.
    """
    rank = rank_here()
    local_rank, local_size = int(first_of(_LOCAL_RANK, "0")), int(first_of(_LOCAL_SIZE, "1"))
    firsts = [int(each) for each in os.environ[NODES].split(",") if each]
    firsts = [each for each in firsts or range(0, size, local_size) if each < size]
    ranks = size - int(os.environ.get("HVDLITE_SPARES", "0"))
    # Of the node, or of a part to which mpirun has bound the rank.
    cores, bound = (len(os.sched_getaffinity(process)) for process in (manager, 0))
    found = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": sum(each <= rank - local_rank for each in firsts) - 1,
        "GROUP_WORLD_SIZE": len(firsts),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
        or max(1, min(cores // local_size, bound)),
    }
    return {name: str(value) for name, value in found.items()}


def _run(command: list[str], output: str, mask: Iterable[int]) -> None:
    subject = output
    try:
        if output:
            _redirect(output)
        _take_stdin()
        subject = command[0]
        # A rank that sees it may just exit: the job ends, with fewer messages than by MPI_Abort.
        os.environ["HVDLITE_LAUNCHER"] = "hvdliterun"
        # Python ignores the first two, mpirun at a terminal the last; they would stay so.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], command)
    except OSError as error:
        host = os.uname().nodename
        os.write(2, f"hvdliterun: {subject} on host {host}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _redirect(output: str) -> None:
    width = len(str(int(first_of(_SIZE, "1")) - 1))
    folder = os.path.join(output, f"rank.{first_of(RANK, '0').zfill(width)}")
    os.makedirs(folder, exist_ok=True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        path = os.path.join(folder, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if os.environ.get("HVDLITE_RESTART", "0") == "0":
            flags |= os.O_TRUNC
        file = os.open(path, flags, 0o666)
        os.dup2(file, number)
        os.close(file)


def _take_stdin() -> None:
    """Have rank 0 read what the launcher would read; for the others, MPICH may keep a pipe open."""
    position, _, path = os.environ.pop(STDIN, "").partition(" ")
    if rank_here() != 0:
        position, _, path = NOTHING.partition(" ")
    if path:
        file = os.open(path, os.O_RDONLY)
        if int(position):
            os.lseek(file, int(position), os.SEEK_SET)
        os.dup2(file, 0)
        os.close(file)


def _wait(child: int, manager: int, channel: Channel | None) -> tuple[int, set[int]]:
    """Wait for the command; return how it ended, and the signals that the manager had sent.

    End it if the launcher has gone and the manager, which should end then, does not.
    """
    signs: set[int] = set()
    orphaned = 0
    while True:
        info = signal.sigtimedwait(_WATCHED, _LOOK)
        orphaned += info is None and channel is not None and channel.peek() == b""
        if info and info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), signs & _FIRST_SIGNS
        elif os.getppid() != manager or orphaned > _ORPHANED:
            os.kill(child, signal.SIGKILL)  # which makes no files from now on
            _end_group()
        elif info and info.si_pid == manager:
            # A process manager signals the whole group, so the command has it already.
            signs.add(info.si_signo)
        elif info:
            os.kill(child, info.si_signo)


def _end_group() -> None:
    """Kill the command and its children, because the manager was killed."""
    folders.remove(_shared)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _end_rest(code: int) -> None:
    """Kill what a command has left in this group, since it keeps the pipes of mpirun open.

    If the command has not failed, kill workers of `multiprocessing` alone: from Python 3.14 on, a
    server keeps them, and they it. Its tracker stays, and removes the memory that they share.
    """
    this = os.getpid()
    for folder in glob.glob("/proc/[0-9]*") if os.getpgrp() == this else ():
        with contextlib.suppress(OSError):  # others' are not opened: that may wait for them
            if os.getpgid(pid := int(folder[6:])) == this != pid:
                with open(f"{folder}/cmdline", "rb") as file:
                    words = file.read()
                if (code or b"from multiprocessing." in words) and b"resource_tracker" not in words:
                    os.kill(pid, signal.SIGKILL)


def _drain() -> None:
    """Wait until mpirun has read this rank's standard error: the job's end would cut it off."""
    import fcntl
    import termios

    deadline = time.monotonic() + _READ
    unread = bytearray(4)
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            fcntl.ioctl(2, termios.FIONREAD, unread)
            if not any(unread):
                return
            time.sleep(0.01)


def _report(
    channel: Channel | None, code: int, text: str, notes: memoryview, under_way: bool
) -> None:
    """Name this rank to the launcher, or, where that is on another host, to the user.

    Its note of leaving goes then. `under_way`: the manager is already ending the job.
    """
    # At once: the end of this rank makes others fail, which must not be named before it.
    reported = _send(channel, protocol.REPORT, str(shell_code(code)), text)
    if channel and reported:
        with contextlib.suppress(OSError):
            channel.receive(_READ)  # SEEN, so that what others report comes behind it
    notes[LEAVING] = 0
    _drain()
    if reported:
        # Ending before the job does would have mpirun print its own account of it.
        if not under_way and not signal.sigtimedwait(_FIRST_SIGNS, _PASS_ON):
            _abort(code)
            _send(channel, protocol.END_JOB)
        signal.sigtimedwait(_ENDING, _END)
    else:
        os.write(2, f"hvdliterun: {text}\n".encode())
        _abort(code)


def _abort(code: int) -> None:
    """Have MPICH's process manager end the job, as MPI_Abort does (a message of PMI-1).

    Otherwise the manager continues after the failure of a rank that does not use MPI, and prints a
    long message about one that does.
    """
    if "PMI_FD" not in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        return
    message = f"cmd=abort exitcode={shell_code(code)}\n"
    with contextlib.suppress(OSError):  # the manager is ending the job already
        os.write(int(os.environ["PMI_FD"]), message.encode())


def _send(channel: Channel | None, kind: bytes, *texts: str) -> bool:
    """Send a message to the launcher, if there is one; return whether it was sent."""
    with contextlib.suppress(OSError):
        if channel is not None:
            channel.send(kind, *(text.encode() for text in texts))
            return True
    return False


def _end(code: int) -> None:
    folders.remove(_shared)
    if code < 0:
        import resource

        # One core dump is enough, and the command has left it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(shell_code(code))


if __name__ == "__main__":
    main(sys.argv[1:])
