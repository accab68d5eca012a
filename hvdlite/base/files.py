"""Atomic replacement of files, safe against other readers and writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hvdlite.base import observers


@contextlib.contextmanager
def replacing(path: Path, keep: int = 1) -> Iterator[IO[bytes]]:
    """Write a file that replaces ``path`` when the ``with`` block has ended.

    ``path`` is at every moment either the old or the new file; the old one where the block raises,
    or the process ends. Several processes may do so at once: the last one to end wins. The new file
    has the permissions of the old one.

    Args:
        path: The file, or a symbolic link to it, which remains. Missing parent folders are made.
        keep: How many generations remain, the new one included; see `previous_generations`. Older
            ones are removed when the new one is durable. 1: no generation is made or removed.

    Raises:
        OSError: The file cannot be written; the previous one is as it was.
    """
    with replacing_by_name(path, keep) as temporary, open(temporary, "xb") as file:
        _copy_permissions(path, temporary)  # of what is not for others' eyes, before it is there
        yield file


@contextlib.contextmanager
def replacing_by_name(path: Path, keep: int = 1) -> Iterator[Path]:
    """Replace a file as `replacing` does, for a library that opens files itself, by their suffix.

    It gets the name of a file that does not exist, with the same suffixes; if it writes none,
    nothing is replaced.
    """
    path = _follow(path)
    with _temporary(path) as temporary:
        yield temporary
        if not temporary.exists():
            return
        _copy_permissions(path, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if keep > 1:
            _keep_generation(path)
        for observe in observers.current:
            observe("checkpoint", temporary)
        os.replace(temporary, path)
    _sync_folder(path.parent)
    if keep > 1:
        for generation in previous_generations(path)[keep - 1 :]:
            generation.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Provide the name of a new file beside ``path``, which is removed at the end.

    Each writer has a name of its own: a job that a scheduler has started again may write to the
    same path while the one before still ends. A file that is locked lies beside it for as long as
    the writer lives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    while True:
        lock = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with open(lock, "xb") as held:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held.fileno()).st_nlink:
                try:
                    yield _locked(lock, path)
                finally:
                    _remove(lock, path)
                return
        # Another writer has taken the lock for that of a dead one, before it was held.


def _locked(lock: Path, path: Path) -> Path:
    """Return the name of the file that a lock is for, with the suffixes of ``path``."""
    return lock.with_name(f"{lock.name}.new{''.join(path.suffixes[-2:])}")


def _remove(lock: Path, path: Path) -> None:
    with contextlib.suppress(OSError):
        _locked(lock, path).unlink(missing_ok=True)
        lock.unlink()  # last: whoever is killed before leaves it to the next writer


def _remove_stale(path: Path) -> None:
    """Remove the files of writers that have died: nobody holds their locks."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    for lock in _matching(path.parent, name):
        # Another writer may have removed or locked it, or locks may be unknown here.
        with contextlib.suppress(OSError), open(lock, "r+b") as free:
            fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock, path)


def previous_generations(path: Path) -> list[Path]:
    """Return the files that ``path`` was before, newest first: ``PATH.generation-NUMBER``.

    Those of a symbolic link lie beside the file that it leads to, and bear its name.
    """
    path = _follow(path)
    name = re.compile(rf"{re.escape(path.name)}\.generation-[0-9]+")
    return sorted(_matching(path.parent, name), key=_generation_number, reverse=True)


def _follow(path: Path) -> Path:
    """Return the file that a symbolic link leads to, also if there is none yet."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _copy_permissions(path: Path, other: Path) -> None:
    with contextlib.suppress(OSError):  # there is no such file yet, or no permissions are kept here
        shutil.copymode(path, other)


def _generation_number(generation: Path) -> int:
    return int(generation.name.rpartition("-")[2])


def _keep_generation(path: Path) -> None:
    """Give the current file a second name, under which it outlives its replacement."""
    if not path.exists():
        return
    previous = previous_generations(path)
    # The newest one is the same file if a writer was killed before it replaced that.
    for number in itertools.count(_generation_number(previous[0]) if previous else 1):
        generation = path.with_name(f"{path.name}.generation-{number}")
        try:
            _link(path, generation)
            return
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # another writer may remove it
                if generation.samefile(path):
                    return


def _link(path: Path, name: Path) -> None:
    """Give a file a second name, or a copy where the file system has no hard links."""
    try:
        os.link(path, name)
    except FileExistsError:
        raise
    except OSError:
        name.touch(exist_ok=False)
        try:
            with _temporary(path) as temporary:
                shutil.copy(path, temporary)
                with open(temporary, "rb") as copy:
                    os.fsync(copy.fileno())
                os.replace(temporary, name)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


def _matching(folder: Path, name: re.Pattern[str]) -> list[Path]:
    with contextlib.suppress(OSError):  # this user may write there, and not look
        return [entry for entry in folder.iterdir() if name.fullmatch(entry.name)]
    return []


def _sync_folder(folder: Path) -> None:
    """Make the renaming last through a loss of power."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # this user may write there, and not look
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no such thing on some mounts
            raise
    finally:
        os.close(descriptor)
