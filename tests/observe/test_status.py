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
    status.note(protocol.JOINING, 1)
    status.ask_launcher()
    assert os.listdir(tmp_path) == []


def test_a_rank_keeps_its_notes_in_the_file_that_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "notes").write_bytes(bytes(protocol.NOTES_SIZE))
    monkeypatch.setenv(protocol.NOTES, str(tmp_path / "notes"))
    monkeypatch.setattr(status, "_notes", status._notes.__wrapped__)
    status.note(protocol.LEAVING, 7)
    assert list(protocol.notes(str(tmp_path / "notes"))) == [0, 0, 0, 7]
