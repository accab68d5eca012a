"""Checkpoints of a job: rank 0 writes and reads, all ranks know and have the same."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.recipe import checkpoint
from tests.harness import ranks
from tests.recipe.trees import assert_same, everything, for_safetensors


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["state", "state.safetensors"])
def test_every_rank_loads_the_state_of_rank_0(tmp_path, name):
    hvd.init()
    state = everything() if name == "state" else for_safetensors()
    saved = checkpoint(tmp_path / "folder" / name)
    assert not saved.exists()
    for step in range(2):
        saved.save({**state, "step": step} if hvd.rank() == 0 else None)
        assert saved.exists()
        assert_same(saved.load(), {**state, "step": step})
    assert os.listdir(tmp_path / "folder") == [name]


@ranks(1, 3)
def test_ranks_do_not_share_what_they_loaded(tmp_path):
    hvd.init()
    saved = checkpoint(tmp_path / "state")
    saved.save({"w": np.zeros(4)})
    mine = saved.load()
    mine["w"] += hvd.rank()
    hvd.barrier()
    assert mine["w"].tolist() == [hvd.rank()] * 4


@ranks(1, 2)
def test_missing(tmp_path):
    hvd.init()
    saved = checkpoint(str(tmp_path / "none"))
    with pytest.raises(hvd.CheckpointError, match=r"none does not exist.*default"):
        saved.load()
    assert saved.load(default=None) is None
    assert saved.load(default=hvd.rank()) == hvd.rank()


@ranks(1, 2, 3)
def test_what_cannot_be_saved_is_an_error_on_all_ranks(tmp_path):
    hvd.init()
    saved = checkpoint(tmp_path / "state")
    saved.save("previous")
    with pytest.raises(TypeError, match=r"state\['optimizer'\]\['x'\] is a object"):
        saved.save({"optimizer": {"x": object()}} if hvd.rank() == 0 else None)

    class LocalError(TypeError):
        """One that cannot be pickled for the other ranks."""

    class Odd(dict):
        def items(self):
            raise LocalError("odd")

    with pytest.raises((TypeError, RuntimeError), match="odd"):
        saved.save(Odd(x=1) if hvd.rank() == 0 else None)
    endless = []
    endless.append(endless)
    with pytest.raises(hvd.CheckpointError, match="contains itself"):
        saved.save(endless)
    assert saved.load() == "previous"


@ranks(1, 3)
def test_a_failed_write_is_an_error_on_all_ranks(tmp_path):
    hvd.init()
    blocker = tmp_path / "file"
    if hvd.rank() == 0:
        blocker.write_text("no folder")
    with pytest.raises(hvd.CheckpointError, match=r"file/state cannot be written.*rank 0"):
        checkpoint(blocker / "state").save(1)
    if hvd.rank() == 0:
        (tmp_path / "folder").mkdir()
    with pytest.raises(hvd.CheckpointError, match=r"folder cannot be written.*IsADirectoryError"):
        checkpoint(tmp_path / "folder").save(1)


@ranks(1, 3)
@pytest.mark.parametrize("name", ["state", "state.safetensors"])
def test_a_failed_read_is_an_error_on_all_ranks(tmp_path, name):
    hvd.init()
    path = pathlib.Path(tmp_path / name)
    saved = checkpoint(path)
    saved.save({"w": np.arange(100.0)})
    if hvd.rank() == 0:
        content = path.read_bytes()
    for damage in ("cut", "folder"):
        if hvd.rank() == 0:
            path.write_bytes(content[: len(content) // 2])
            if damage == "folder":
                path.unlink()
                path.mkdir()
        for default in ({}, {"default": 1}):
            with pytest.raises(hvd.CheckpointError, match="state"):
                saved.load(**default)


@ranks(2)
def test_the_file_need_only_exist_for_rank_0(tmp_path):
    hvd.init()
    saved = checkpoint(tmp_path / f"of-rank-{hvd.rank()}")
    saved.save({"rank": hvd.rank()})
    assert saved.exists()
    assert saved.load() == {"rank": 0}
    assert os.listdir(tmp_path) == ["of-rank-0"]


@ranks(1, 3)
def test_a_thread_writes_what_every_rank_loads(tmp_path):
    hvd.init()
    saved = checkpoint(tmp_path / "state", keep=2)
    state = {"w": np.zeros(1000)}
    for step in range(3):
        state["w"] += 1
        saved.save({**state, "step": step}, blocking=False)
    state["w"] += 1
    assert_same(saved.load(default=None), {"w": np.full(1000, 3.0), "step": 2})
    if hvd.rank() == 0:
        saved.path.write_bytes(saved.path.read_bytes()[:-9])
    assert_same(saved.load(), {"w": np.full(1000, 2.0), "step": 1})
    blocked = checkpoint(tmp_path)
    blocked.save(1, blocking=False)
    with pytest.raises(hvd.CheckpointError, match=r"cannot be written.*IsADirectoryError"):
        blocked.save(2)
    with pytest.raises(TypeError, match="state"):
        saved.save(object(), blocking=False)
    assert saved.load()["step"] == 1
