"""Horovod's helpers, which other libraries import."""

from __future__ import annotations

import os

import pytest

from hvdlite.horovod import util


def test_env_is_as_before_in_the_end(monkeypatch):
    monkeypatch.setenv("THERE", "old")
    monkeypatch.delenv("NEW", raising=False)

    def changed():
        with util.env(THERE="new", NEW="x", LEFT=None):
            assert (os.environ["THERE"], os.environ["NEW"]) == ("new", "x")
            assert "LEFT" not in os.environ
            del os.environ["NEW"]
            raise KeyError

    with pytest.raises(KeyError):
        changed()
    assert os.environ["THERE"] == "old"
    assert "NEW" not in os.environ


def test_split_list():
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 2) == [[1], []]
    assert util.split_list([], 2) == [[], []]


def test_extensions_are_frameworks(monkeypatch):
    find = util.importlib.util.find_spec
    monkeypatch.setattr(
        util.importlib.util, "find_spec", lambda name: None if name == "torch" else find("json")
    )
    assert util.extension_available("tensorflow", verbose=True)
    util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    with pytest.raises(ImportError, match=r"pip install hvdlite\[torch\]"):
        util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    assert not util.extension_available("mxnet")
    assert util.gpu_available("mxnet") is False
