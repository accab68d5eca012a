"""Folders that go with their process, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.launch import folders

HOLD = """
import sys, time
from hvdlite.launch import folders
if sys.argv[2] == "guarded":
    context = folders.temporary(sys.argv[1], sys.argv[3])
    path = context.__enter__()
else:
    path, _ = folders.make(sys.argv[1])
open(path + "/file", "w")
print(path, flush=True)
time.sleep(60)
"""


def killed(*arguments):
    """Have a process make a folder, kill it, and return the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as process:
        path = Path(process.stdout.readline().strip())
        assert (path / "file").exists()
        folders.sweep(str(path.parent))
        assert (path / "file").exists()
        process.send_signal(signal.SIGKILL)
    return path


def test_a_folder_is_there_for_as_long_as_the_context(tmp_path):
    with folders.temporary(str(tmp_path), str(tmp_path)) as path:
        assert Path(path).stat().st_mode & 0o077 == 0
        Path(path, "inner").mkdir()
        Path(path, "inner", "file").touch()
        Path(path, "link").symlink_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_guard_follows_the_process(tmp_path):
    others = tmp_path / "others"
    others.mkdir()
    abandoned, lock = folders.make(str(others))
    os.close(lock)
    path = killed(tmp_path, "guarded", others)
    deadline = time.monotonic() + 20
    while path.exists() or Path(abandoned).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_next_process_sweeps(tmp_path):
    path = killed(tmp_path, "alone")
    assert path.exists()
    folders.sweep(str(tmp_path))
    assert not path.exists()


def test_a_folder_without_a_lock_is_removed_if_it_is_empty(tmp_path):
    empty, kept = tmp_path / "hvdlite-01234567", tmp_path / "hvdlite-89abcdef"
    empty.mkdir()
    kept.mkdir()
    (kept / "mine").touch()
    folders.sweep(str(tmp_path))
    assert not empty.exists()
    assert (kept / "mine").exists()


@pytest.mark.parametrize("name", ["hvdlite-experiments", "hvdlite-0123456", "other-01234567"])
def test_other_folders_stay(name, tmp_path):
    (tmp_path / name).mkdir()
    folders.sweep(str(tmp_path))
    assert (tmp_path / name).exists()


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    path, lock = folders.make(str(target))
    os.close(lock)
    (tmp_path / "hvdlite-01234567").symlink_to(path)
    folders.sweep(str(tmp_path))
    assert Path(path).exists()


def test_a_folder_swept_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock, swept = folders.fcntl.flock, []

    def sweep_first(file, operation):
        if not swept:
            swept.append(file)
            folders.sweep(str(tmp_path))
        lock(file, operation)

    monkeypatch.setattr(folders.fcntl, "flock", sweep_first)
    path, held = folders.make(str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == [Path(path).name]
    os.close(held)


def test_the_end_does_not_wait_for_forked_children(tmp_path):
    child = 0
    try:
        with folders.temporary(str(tmp_path), str(tmp_path)):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
