"""The notes of a rank for its launcher, also where there is none on this host."""

import os

import pytest

from hvdlite.observe import protocol, status


@pytest.mark.parametrize("folder", [None, "", "/of/another/host"])
def test_a_rank_without_a_folder_leaves_no_notes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(protocol.FOLDER, raising=False)
    if folder is not None:
        monkeypatch.setenv(protocol.FOLDER, folder)
    with status.joining():
        assert os.listdir(tmp_path) == []
    status.ask_launcher()
    assert os.listdir(tmp_path) == []


def test_a_rank_notes_that_it_waits_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv(protocol.FOLDER, str(tmp_path))
    with status.joining():
        assert os.listdir(tmp_path) == [status.JOINING]
    assert os.listdir(tmp_path) == []
