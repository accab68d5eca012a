"""Folders that go with their process, or else with the next one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.launch import folders

HOLD = """
import os, sys, time
from hvdlite.launch import folders
with folders.temporary(sys.argv[1], sys.argv[1]) as path:
    open(path + "/file", "w")
    os.makedirs(path + "/inner/folder")
    print(path, flush=True)
    time.sleep(60)
"""


def killed(parent):
    """Have a process make a folder, kill it, and return the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdout=subprocess.PIPE, text=True
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


def test_the_next_process_sweeps(tmp_path):
    """Before it makes a folder, and in the other folder at its end."""
    parent, others = tmp_path / "parent", tmp_path / "others"
    parent.mkdir()
    others.mkdir()
    first, second = killed(parent), killed(others)
    assert (first / "file").exists()
    with folders.temporary(str(parent), str(others)):
        assert not first.exists()
        assert second.exists()
    assert [*parent.iterdir(), *others.iterdir()] == []


def test_what_resists_stays_for_the_next(tmp_path, monkeypatch):
    with folders.temporary(str(tmp_path), str(tmp_path)) as path:
        Path(path, "file").touch()
        monkeypatch.setattr(os, "rmdir", os.unlink)
    assert Path(path).exists()
    monkeypatch.undo()
    folders.sweep(str(tmp_path))
    assert not Path(path).exists()


def test_other_users_folders_stay(tmp_path, monkeypatch):
    path = killed(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    folders.sweep(str(tmp_path))
    assert path.exists()


@pytest.mark.parametrize("name", ["hvdlite-experiments", "hvdlite-01234567-89abcdef", "{}0", "o{}"])
def test_other_folders_stay(name, tmp_path):
    """They may be another host's."""
    name = name.format(Path(killed(tmp_path)).name)
    (tmp_path / name).mkdir()
    folders.sweep(str(tmp_path))
    assert (tmp_path / name).exists()


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    path, lock = folders.make(str(target))
    os.close(lock)
    (tmp_path / Path(path).name).symlink_to(path)
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
