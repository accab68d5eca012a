"""Temporary folders that go with their process, or else with the next one.

A process holds a lock on its folder, and removes the folder at its end. If it is killed, the lock
becomes free, and the next process that looks for such folders removes them (`sweep`).

`rank` imports this file by its path, so it imports nothing of hvdlite.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import zlib
from collections.abc import Iterator

# Only folders of this host: a lock on a network's file system may hold on one host alone.
_PREFIX = f"hvdlite-{zlib.crc32(os.uname().nodename.encode()):08x}-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{8}")


@contextlib.contextmanager
def temporary(parent: str, others: str) -> Iterator[str]:
    """Provide a folder in a parent for as long as the context lasts; sweep both parents."""
    sweep(parent)
    path, lock = make(parent)
    try:
        yield path
    finally:
        remove(path)
        os.close(lock)
        sweep(others)  # of processes that were killed


def make(parent: str) -> tuple[str, int]:
    """Make a folder for this user alone; return it, and the descriptor that holds its lock."""
    while True:
        path = os.path.join(parent, f"{_PREFIX}{os.urandom(4).hex()}")
        os.mkdir(path, mode=0o700)
        # Until it is locked, a sweep may remove it; then another one is made.
        with contextlib.suppress(FileNotFoundError):
            lock = _open(path)
            with contextlib.suppress(OSError):  # a file system without locks is never swept
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def sweep(parent: str) -> None:
    """Remove the folders in `parent` whose processes have been killed."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(parent)
    for name in filter(_NAME.fullmatch, names):
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):  # it is none, another user's, or locked
            lock = _open(path)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path)
            finally:
                os.close(lock)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def remove(path: str) -> None:
    """Remove a folder; what resists stays, for a later `sweep`."""
    import shutil  # which takes longer to load than the rest of what `rank` needs

    shutil.rmtree(path, ignore_errors=True)
