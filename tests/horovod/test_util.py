"""Horovod's helpers, which other libraries import."""

from __future__ import annotations

import os

import pytest

from hvdlite.horovod import util
from hvdlite.reduction import Average, Sum


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


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.0.0", "2.0.0", True),
        ("2.0", "2.0.0", True),
        ("2.13.0+cpu", "2.9.1", True),
        ("1.9.9", "1.10.0", False),
        ("2.0.0rc1", "2.0.0", False),
        ("2.0.1.dev3", "2.0.0", True),
        ("3.0.0a0", "2.16.2", True),
    ],
)
def test_versions(version, target, expected):
    assert util.is_version_greater_equal_than(version, target) is expected


@pytest.mark.parametrize(("version", "target"), [(2, "2.0.0"), ("2.0.0", "2.0"), ("x", "2.0.0")])
def test_what_is_no_version_is_named(version, target):
    with pytest.raises(ValueError, match=r"found 2 and|target='2.0'|'x' is no version"):
        util.is_version_greater_equal_than(version, target)


def test_small_ones():
    assert [util.num_rank_is_power_2(n) for n in (0, 1, 2, 3, 4, 6)] == [0, 1, 1, 0, 1, 0]
    assert (util.is_iterable("ab"), util.is_iterable(3)) == (True, False)
    assert util.get_extension_full_path("/a/b.py", "c", "d") == f"/a/c/d{util.get_ext_suffix()}"
    assert util.check_installed_version("torch", "1.0") is None
    choose = util.get_average_backwards_compatibility_fun(util.sys.modules["hvdlite"])
    assert (choose(None, None), choose(Sum, None)) == (Average, Sum)
    with pytest.warns(DeprecationWarning, match="op="):
        assert choose(None, False) == Sum
    with pytest.raises(ValueError, match="give only op"):
        choose(Sum, True)
    error = util.HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.0")
    assert str(error) == util.get_version_mismatch_message("torch", "2.1", "2.0")


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
