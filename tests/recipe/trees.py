"""Trees of state for the tests of checkpoints, and their comparison to the bit."""

from __future__ import annotations

import datetime
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np


def everything() -> dict[Any, Any]:
    """A tree with one of everything that a checkpoint holds."""
    generator = np.random.default_rng(7)
    matrix = generator.normal(size=(6, 10)).astype(np.float32)
    return {
        "plain": [None, True, False, 0, -5, 2**63 - 1, 2**64, -(2**70), 3**20000],
        "floats": [0.1, -0.0, 5e-324, 1e308, math.nan, math.inf, -math.inf],
        "strings": ["", "Größe \U0001f600", "\ud800", "a\0b", b"", b"\x80\0pickle\n", b"x" * 300],
        "empty": [{}, [], (), [()], {"a": ({},)}],
        "tuples": (1, (2, [3, (4,)]), ("x",)),
        3: "int key",
        "3": "str key",
        -1: {2.5: "float key", None: "no key", True: "bool key", 2**80: "big", math.inf: "inf"},
        "arrays": {
            "matrix": matrix,
            "fortran": np.asfortranarray(matrix),
            "transposed": matrix.T,
            "strided": matrix[::-2, 1::3],
            "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
            "zero-dim": np.array(2.5),
            "no elements": np.zeros((3, 0, 2), np.int16),
            "big-endian": np.arange(5, dtype=">i4"),
            "bool": generator.random((3, 3)) > 0.5,
            "text": np.array(["ä", "bcd"]),
            "bytes": np.array([b"a", b"bcd"]),
            "no width": np.zeros(2, "U0"),
            "dates": np.array(["2024-02-29", "NaT"], "M8[D]"),
            "record": np.array([(1, [0.5, 2])], [("größe Ω", "i4"), ("b", "f8", (2,))]),
            "nan payload": np.array([0x7FC00123, 0xFFC00001], np.uint32).view(np.float32),
        },
        "dtypes": [
            np.array([0, 1, 100]).astype(dtype) for dtype in (*"bBhHiIlLqQefdgFDG", "m8[s]")
        ],
        "bfloat16": {
            "array": matrix.astype(ml_dtypes.bfloat16),
            "strided": matrix.astype(ml_dtypes.bfloat16)[:, ::2],
            "zero-dim": np.array(1.5, ml_dtypes.bfloat16),
            "scalar": ml_dtypes.bfloat16(3.0),
            "float8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        },
        "scalars": [
            np.float32(0.1),
            np.float64(0.1),
            np.int64(-3),
            np.uint8(200),
            np.bool_(True),
            np.complex64(1 + 2j),
            np.datetime64(datetime.date(2024, 2, 29)),
            np.str_("ü"),
            np.bytes_(b"z"),
        ],
    }


def for_safetensors() -> dict[Any, Any]:
    """A tree with one of everything that a safetensors file holds."""
    tree = everything()
    arrays, scalars = tree["arrays"], tree["scalars"]
    for name in ("big-endian", "text", "bytes", "no width", "dates", "record"):
        del arrays[name]
    kinds = [np.bool_, *"bBhHiIqQefdF", ml_dtypes.bfloat16]
    kinds += [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    tree["dtypes"] = [np.array([0, 1, 100]).astype(kind) for kind in kinds]
    tree["scalars"] = [each for each in scalars if each.dtype.kind not in "MUS"]
    return tree


def weights(seed: int, megabytes: float) -> dict[str, Any]:
    """A tree that is mostly one large array."""
    generator = np.random.default_rng(seed)
    return {"seed": seed, "weights": generator.random(int(megabytes * 2**17))}


def assert_same(found: Any, expected: Any, path: str = "state") -> None:
    """Compare two trees: types, order of keys, dtypes, shapes and every bit."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert_same(list(found), list(expected), f"keys of {path}")
        for key in expected:
            assert_same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, item in enumerate(expected):
            assert_same(found[index], item, f"{path}[{index}]")
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype, path
        assert found.shape == expected.shape, path
        if expected.dtype.char in "gG":  # some of their bytes are padding
            np.testing.assert_array_equal(found, expected, path)
        else:
            assert found.tobytes() == expected.tobytes(), path
    elif isinstance(expected, float):
        assert struct.pack("d", found) == struct.pack("d", expected), path
    else:
        assert found == expected, path
