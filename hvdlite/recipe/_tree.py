"""Trees of values and arrays, split into JSON and a list of arrays, and put together again.

In the JSON, None, booleans, strings, integers of up to 64 bits, finite floats and lists stand
for themselves. Everything else is an object of one entry, ``{kind: content}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

_Arrays = list[npt.NDArray[Any]]
_Path = tuple[Any, ...]  # the keys and indices that lead to a value

_ALLOWED = (
    "dict, list, tuple, None, bool, int, float, str, bytes, numpy scalars and numpy arrays "
    "(of any dtype but object)"
)

_ENDLESS = "the state contains itself, or is nested too deeply"

#: Types that numpy knows and its file format does not, by name.
EXTENSION_DTYPES = {
    np.dtype(scalar).name: np.dtype(scalar)
    for scalar in vars(ml_dtypes).values()
    if isinstance(scalar, type) and issubclass(scalar, np.generic)
}


def flatten(state: Any) -> tuple[Any, _Arrays, list[_Path]]:
    """Split a tree into a structure for ``json`` and the arrays that it refers to by number.

    The arrays are the tree's own, not copies. With them comes the path of each.

    Args:
        state: A tree of dicts, lists and tuples (subclasses come back as these), of plain
            Python values, and of numpy scalars and arrays.

    Raises:
        TypeError: The tree holds another type.
        ValueError: The tree contains itself, or is nested too deeply.
    """
    found: list[tuple[_Path, npt.NDArray[Any]]] = []
    try:
        structure = _encode(state, (), found)
    except RecursionError:
        raise ValueError(_ENDLESS) from None
    return structure, [array for _, array in found], [path for path, _ in found]


def unflatten(node: Any, arrays: _Arrays) -> Any:
    """Return the tree that `flatten` has split; raise any exception for another structure."""
    if isinstance(node, list):
        return [unflatten(item, arrays) for item in node]
    if isinstance(node, dict):
        ((kind, content),) = node.items()
        return _DECODERS[kind](content, arrays)
    return node


def map_leaves(
    convert: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False
) -> Any:
    """Return the tree with every leaf converted.

    Args:
        tree: Mappings, lists and tuples, which come back as dicts, lists and tuples.
        is_leaf: Returns True for mappings, lists and tuples that are leaves too.

    Raises:
        TypeError: From ``convert``; the message says where in the tree.
        ValueError: The tree contains itself, or is nested too deeply.
    """

    def visit(node: Any, path: str) -> Any:
        if not is_leaf(node):
            if isinstance(node, Mapping):
                return {key: visit(item, f"{path}[{key!r}]") for key, item in node.items()}
            if isinstance(node, (list, tuple)):
                items = (visit(item, f"{path}[{index}]") for index, item in enumerate(node))
                return list(items) if isinstance(node, list) else tuple(items)
        try:
            return convert(node)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from error

    try:
        return visit(tree, "state")
    except RecursionError:
        raise ValueError(_ENDLESS) from None


def _encode(value: Any, path: _Path, found: list[Any]) -> Any:
    # numpy's scalars come first: np.float64 is also a float, np.str_ also a str.
    if isinstance(value, np.generic):
        return {"scalar": _encode_array(np.asarray(value), path, found)}
    if type(value) in (np.ndarray, np.memmap):
        return {"array": _encode_array(value, path, found)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return _encode_plain(value)
    if isinstance(value, bytes):
        return {"bytes": _encode_array(np.frombuffer(value, np.uint8), path, found)}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, (*path, index), found) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {
            "dict": [
                [_encode_key(key, path), _encode(item, (*path, key), found)]
                for key, item in value.items()
            ]
        }
    raise TypeError(f"{_text(path)} is a {_type_name(value)}; a checkpoint holds {_ALLOWED}")


def _encode_plain(value: bool | int | float | str | None) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": float.hex(value)}
    if isinstance(value, int) and value.bit_length() > 64:
        return {"int": hex(value)}  # Python bounds the length of a decimal, not of this
    return value


def _encode_key(key: Any, path: _Path) -> Any:
    if isinstance(key, np.generic) or not (key is None or isinstance(key, (bool, int, float, str))):
        raise TypeError(
            f"the key {key!r} of {_text(path)} is a {_type_name(key)}; "
            "a key is a str, int, float, bool or None"
        )
    return _encode_plain(key)


def _encode_array(array: npt.NDArray[Any], path: _Path, found: list[Any]) -> Any:
    """Append the array and return its number, with its dtype if numpy's format lacks it."""
    is_extension = array.dtype in EXTENSION_DTYPES.values()
    if not is_extension and (array.dtype.hasobject or not _survives(array.dtype)):
        raise TypeError(
            f"{_text(path)} is an array of dtype {array.dtype}; a checkpoint holds {_ALLOWED}"
        )
    found.append((path, array))
    return [len(found) - 1, array.dtype.name if is_extension else None]


def _text(path: _Path) -> str:
    return "state" + "".join(f"[{each!r}]" for each in path)


def _survives(dtype: np.dtype[Any]) -> bool:
    described = np.lib.format.dtype_to_descr(dtype)
    return bool(np.lib.format.descr_to_dtype(described) == dtype)


def _decode_array(content: Any, arrays: _Arrays) -> npt.NDArray[Any]:
    number, dtype_name = content
    array: npt.NDArray[Any] = arrays[number]
    return array if dtype_name is None else array.view(EXTENSION_DTYPES[dtype_name])


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


_DECODERS: dict[str, Callable[[Any, _Arrays], Any]] = {
    "int": lambda content, arrays: int(content, 16),
    "float": lambda content, arrays: float.fromhex(content),
    "bytes": lambda content, arrays: _decode_array(content, arrays).tobytes(),
    "scalar": lambda content, arrays: _decode_array(content, arrays)[()],
    "array": _decode_array,
    "tuple": lambda content, arrays: tuple(unflatten(content, arrays)),
    "dict": lambda content, arrays: {
        unflatten(key, arrays): unflatten(item, arrays) for key, item in content
    },
}
