"""The two formats of checkpoints: numpy's npz, and safetensors. Nothing is pickled.

Both hold the structure and the arrays that `hvdlite.recipe._tree` makes of a state.

An npz, which ``np.load`` opens too, has one additional member of JSON: ``structure.json`` holds the
format's name and version and the tree; its arrays are the members ``0.npy``, ``1.npy`` and so on.
zip gives every member a CRC-32.

A safetensors file, which ``safetensors.numpy.load_file`` and others read, is 8 bytes with the
length of the header, the header as JSON, and the arrays' bytes
(https://github.com/huggingface/safetensors). It is written here and not by the package, which
takes two copies of all arrays and three times as long to write into an open file, or writes a
temporary file of its own that only its owner may read and that nobody removes after a crash. An
array's name is its path in the tree, joined by dots. The metadata hold the tree, and checksums,
which the format lacks; a file without them is read as a dict of arrays.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable
from typing import IO, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hvdlite.errors import CheckpointError
from hvdlite.recipe._tree import EXTENSION_DTYPES

_Array = npt.NDArray[Any]

_VERSION = 1
#: The member of an npz that has the structure.
STRUCTURE = "structure.json"
_FORMAT = "hvdlite checkpoint"
# Keys of a safetensors header, and of its metadata.
_METADATA = "__metadata__"
_KEY = "hvdlite"
_CHECKSUM = "hvdlite.crc32"
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DTYPES |= {
    f"{kind.upper()}{8 * int(size)}": np.dtype(f"<{kind}{size}")
    for kind, size in ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8")
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def write_npz(file: IO[bytes], structure: Any, arrays: list[_Array]) -> None:
    """Write what `flatten` has returned, array by array, without a copy of the whole."""
    header = {"format": _FORMAT, "version": _VERSION, "arrays": len(arrays), "tree": structure}
    with zipfile.ZipFile(file, "w") as archive:
        # ZipInfo without a date: equal states give equal files.
        archive.writestr(zipfile.ZipInfo(STRUCTURE), json.dumps(header, allow_nan=False))
        for number, array in enumerate(arrays):
            # numpy's format lacks these types: they are stored as integers of their width.
            is_extension = array.dtype in EXTENSION_DTYPES.values()
            stored = array.view(f"u{array.itemsize}") if is_extension else array
            member_info = zipfile.ZipInfo(f"{number}.npy")
            with archive.open(member_info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, stored, version=(3, 0), allow_pickle=False)


def read_npz(file: IO[bytes]) -> tuple[Any, list[_Array]]:
    """Return what `write_npz` was given.

    Raises:
        CheckpointError: the file is foreign or of another version.
        Exception: the file is damaged; zipfile and numpy raise a dozen types.
    """
    with zipfile.ZipFile(file) as archive:
        if STRUCTURE not in archive.namelist():
            raise CheckpointError(
                f"{file.name} is not a checkpoint of hvdlite: a zip file without {STRUCTURE} "
                f"(it has {', '.join(archive.namelist()[:3]) or 'nothing'})"
            )
        header = json.loads(archive.read(STRUCTURE))
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise CheckpointError(
                f"{file.name} is not a checkpoint of hvdlite: {STRUCTURE} lacks the format "
                f"{_FORMAT!r}"
            )
        _check_version(file.name, header["version"])
        return header["tree"], [_read_member(archive, i) for i in range(header["arrays"])]


def _read_member(archive: zipfile.ZipFile, number: int) -> _Array:
    name = f"{number}.npy"
    size = archive.getinfo(name).file_size
    with archive.open(name) as member:
        array: _Array = np.lib.format.read_array(member, allow_pickle=False, max_header_size=size)
        # zipfile compares the checksum only after the last byte, so read to the end.
        if member.read(1):
            raise ValueError(f"{name} is longer than its array")
    return array


def named(
    arrays: list[_Array], paths: Iterable[tuple[Any, ...]], tensor_key: str
) -> dict[str, _Array]:
    """Name what `flatten` has returned: each array by its path, made unique.

    Args:
        tensor_key: the key of the dicts that mark an array as a tensor; empty: none do.
    """
    found: dict[str, _Array] = {}
    for path, array in zip(paths, arrays, strict=True):
        keys = path[:-1] if path[-1:] == (tensor_key,) else path
        # JSON of other languages has no lone surrogates.
        name = ".".join(map(str, keys)).encode(errors="replace").decode() or "state"
        while name in found or name == _METADATA:
            name += "_"
        if array.dtype not in _CODES:
            known = ", ".join(dtype.name for dtype in _CODES)
            raise TypeError(
                f"{name!r} is an array of dtype {array.dtype}; a .safetensors file holds {known}; "
                "convert it, or name the file .npz"
            )
        found[name] = array
    return found


def write_safetensors(file: IO[bytes], structure: Any, arrays: dict[str, _Array]) -> None:
    """Write arrays, and the structure of their tree."""
    layouts = [_layout(name, array) for name, array in arrays.items()]
    own = json.dumps({"version": _VERSION, "tree": structure, "arrays": layouts}, allow_nan=False)
    checksum = str(zlib.crc32(own.encode()))
    header: dict[str, Any] = {_METADATA: {_KEY: own, _CHECKSUM: checksum}}
    # Wide types first, so that every array is aligned.
    layouts.sort(key=lambda layout: -arrays[layout[0]].itemsize)
    end = 0
    for name, code, shape, _ in layouts:
        begin, end = end, end + arrays[name].nbytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, *_ in layouts:
        file.write(_bytes_of(arrays[name]))


def read_safetensors(file: IO[bytes], tensor_key: str) -> tuple[Any, list[_Array]]:
    """Return the structure and the arrays of a file, hvdlite's or another program's.

    Args:
        tensor_key: of the dicts that mark an array as a tensor, for files of other programs.

    Raises:
        CheckpointError: the file is of another version.
        Exception: the file is damaged or cut off.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if 8 + length > size:
        raise ValueError(f"the header takes {length} bytes, the file {size}")
    header = json.loads(file.read(length))
    metadata = header.pop(_METADATA, {})
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    end = 0
    for name, entry in entries:
        begin, stop = entry["data_offsets"]
        nbytes = math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
        if begin != end or stop - begin != nbytes or min(entry["shape"], default=0) < 0:
            raise ValueError(f"{name!r} takes {nbytes} bytes, and has those from {begin} to {stop}")
        end = stop
    if 8 + length + end != size:
        raise ValueError(f"the arrays take {end} bytes, the file has {size - 8 - length} for them")
    arrays = {name: _read_array(file, entry) for name, entry in entries}
    if not metadata.keys() & {_KEY, _CHECKSUM}:
        leaves: list[Any] = [{"array": [number, None]} for number in range(len(arrays))]
        if tensor_key:
            leaves = [{"dict": [[tensor_key, leaf]]} for leaf in leaves]
        return {"dict": list(map(list, zip(arrays, leaves, strict=True)))}, list(arrays.values())
    if str(zlib.crc32(metadata[_KEY].encode())) != metadata[_CHECKSUM]:
        raise ValueError("the tree does not match its checksum")
    own = json.loads(metadata[_KEY])
    _check_version(file.name, own["version"])
    for name, *layout in own["arrays"]:
        if [name, *layout] != _layout(name, arrays[name]):
            raise ValueError(f"{name!r} does not match its layout or its checksum")
    return own["tree"], [arrays[name] for name, *_ in own["arrays"]]


def _read_array(file: IO[bytes], entry: dict[str, Any]) -> _Array:
    array = np.empty(entry["shape"], _DTYPES[entry["dtype"]])
    content = array.reshape(-1).view(np.uint8)
    if file.readinto(content) != array.nbytes:  # type: ignore[attr-defined]
        raise ValueError("the file has become shorter")
    return array


def _layout(name: str, array: _Array) -> list[Any]:
    return [name, _CODES[array.dtype], list(array.shape), zlib.crc32(_bytes_of(array))]


def _bytes_of(array: _Array) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _check_version(path: str, version: Any) -> None:
    if version != _VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {version!r}, this hvdlite reads version "
            f"{_VERSION}: load it with the hvdlite that wrote it"
        )
