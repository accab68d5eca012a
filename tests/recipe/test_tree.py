"""Trees taken apart and put together."""

from __future__ import annotations

import collections
import pathlib

import ml_dtypes
import numpy as np
import pytest

from hvdlite.recipe._tree import flatten, map_leaves, unflatten
from tests.recipe.trees import assert_same


@pytest.mark.parametrize("leaf", [None, 5, "x", 1.5, (), np.float32(1), np.arange(3)])
def test_a_leaf_is_a_tree(leaf):
    assert_same(unflatten(*flatten(leaf)[:2]), leaf)


def test_subclasses_come_back_as_what_they_extend():
    point = collections.namedtuple("point", "x y")
    state = collections.OrderedDict(a=point(1, 2), b=np.memmap)
    state["b"] = collections.Counter("aab")
    assert_same(unflatten(*flatten(state)[:2]), {"a": (1, 2), "b": {"a": 2, "b": 1}})


def test_a_memory_map_comes_back_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "map", np.int32, "w+", shape=(4,))
    mapped[:] = range(4)
    structure, arrays, _ = flatten(mapped)
    assert_same(np.array(unflatten(structure, arrays)), np.arange(4, dtype=np.int32))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"optimizer": {"x": object()}}, r"state\['optimizer'\]\['x'\] is a object"),
        ([1, (2, {3})], r"state\[1\]\[1\] is a set"),
        ({1: {"path": pathlib.PurePosixPath("/")}}, r"state\[1\]\['path'\] is a pathlib"),
        (1 + 2j, "state is a complex"),
        ([np.array([None])], r"state\[0\] is an array of dtype object"),
        (np.array([(1, None)], [("a", int), ("b", object)]), "state is an array of dtype"),
        (np.zeros(2, [("a", ml_dtypes.bfloat16)]), "state is an array of dtype"),
        (np.ma.masked_array([1, 2], [True, False]), r"state is a numpy\.ma\.(core\.)?MaskedArray"),
        ({"a": {(1, 2): 0}}, r"the key \(1, 2\) of state\['a'\] is a tuple"),
        ({b"k": 0}, "the key b'k' of state is a bytes"),
        ({np.int64(3): 0}, "the key .*3.* of state is a numpy.int64"),
        (bytearray(b"a"), "state is a bytearray"),
    ],
)
def test_what_a_tree_cannot_hold(state, words):
    with pytest.raises(TypeError, match=words):
        flatten(state)


def test_the_refusal_tells_what_is_allowed():
    with pytest.raises(TypeError, match="dict, list, tuple, None, bool, int, float, str, bytes"):
        flatten({"model": object()})


def test_a_tree_that_contains_itself():
    state = []
    state.append(state)
    with pytest.raises(ValueError, match="contains itself"):
        flatten(state)


def test_map_leaves():
    tree = collections.OrderedDict(a=[1, (2, 3)], b={"c": 4}, d=())
    assert_same(map_leaves(str, tree), {"a": ["1", ("2", "3")], "b": {"c": "4"}, "d": ()})
    assert map_leaves(len, [[1, 2], (3,)], is_leaf=lambda node: node in ([1, 2], (3,))) == [2, 1]


def test_map_leaves_says_where_it_failed():
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]: .*NoneType"):
        map_leaves(float, {"a": [1, None]})
    endless = {}
    endless["a"] = endless
    with pytest.raises(ValueError, match="contains itself"):
        map_leaves(float, endless)
