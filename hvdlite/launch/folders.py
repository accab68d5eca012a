"""Temporary folders that go with their process, whatever ends it.

A process holds a lock on a file in its folder, and removes the folder at its end. If it is killed,
the lock becomes free: a guard, a small process that waits for it, removes the folder then. If both
are killed, the next process that looks for such folders does (`sweep`).

`rank` imports this file by its path, and the guard runs it by its path
(``python -I -S folders.py FOLDER OTHERS``), so it imports nothing of hvdlite.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence

# Only folders of this host: a lock on a network's file system may hold on one host alone.
_LOCK = f"lock.{os.uname().nodename}"
_NAME = re.compile(r"hvdlite-[0-9a-f]{8}")
# For so long after the death of its process a guard removes what others of the job still write, and
# how often.
_SECONDS_AFTER_DEATH, _PAUSE = 3.0, 0.5


@contextlib.contextmanager
def temporary(parent: str, others: str) -> Iterator[str]:
    """Provide a folder for as long as the context lasts, and guard it.

    Args:
        parent: where to make it, after a `sweep`.
        others: another folder to sweep at the end, or when this process has been killed.

    Raises:
        OSError: it cannot be made.
    """
    import subprocess  # which the process around a rank does not need

    sweep(parent)
    path, lock = make(parent)
    guard: subprocess.Popen[bytes] | None = None
    with contextlib.suppress(OSError):
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, path, others],
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives what kills a group, such as Ctrl-C
        )
    try:
        yield path
    finally:
        remove(path)
        sweep(others)  # of processes that were killed
        with contextlib.suppress(OSError):  # a forked child of this process may hold it, too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        if guard is not None and not os.path.exists(path):
            guard.wait()


def main(arguments: Sequence[str]) -> None:
    """Guard a folder."""
    path, others = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(path):
        return  # its process came to its end
    deadline = time.monotonic() + _SECONDS_AFTER_DEATH
    while time.monotonic() < deadline:
        time.sleep(_PAUSE)  # first the job's processes remove what they can
        remove(path)
        sweep(others)


def make(parent: str) -> tuple[str, int]:
    """Make a folder that only this user can open, and lock it.

    Returns:
        Its path, and the descriptor that holds the lock until it is closed.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        path = os.path.join(parent, f"hvdlite-{os.urandom(4).hex()}")
        name = os.path.join(path, _LOCK)
        # Until it is locked, a sweep may remove it; then another one is made.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(path, mode=0o700)
            lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks is never swept
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(name):
                return path, lock
            os.close(lock)


def sweep(parent: str) -> None:
    """Remove the folders in `parent` whose processes have been killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if _NAME.fullmatch(name):
                remove_abandoned(os.path.join(parent, name))


def remove_abandoned(path: str) -> None:
    """Remove a folder from `make` if the process that has made it is gone."""
    lock = -1
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        try:
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
        except FileNotFoundError:  # killed before it made the lock, or another host's
            os.rmdir(path)
    if lock >= 0:
        os.close(lock)


def remove(path: str) -> None:
    """Remove a folder from `make`; what resists stays, for a later `sweep`."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name != _LOCK:
                _remove_entry(os.path.join(path, name))
        if os.listdir(path) == [_LOCK]:
            os.unlink(os.path.join(path, _LOCK))
            os.rmdir(path)


def _remove_entry(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:  # a folder
        import shutil  # takes long, and is seldom needed in the process around a rank

        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
