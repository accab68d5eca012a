"""Checkpoints as numpy's npz, which ``np.load`` opens too, with one additional member of JSON.

``structure.json`` holds the format's name and version and the tree; its arrays are the
members ``0.npy``, ``1.npy`` and so on. zip gives every member a CRC-32. Nothing is pickled.
"""

from __future__ import annotations

import json
import zipfile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hvdlite.errors import CheckpointError
from hvdlite.recipe._tree import EXTENSION_DTYPES, check_version

STRUCTURE = "structure.json"
_FORMAT = "hvdlite checkpoint"
_VERSION = 1


def write(file: IO[bytes], structure: Any, arrays: list[npt.NDArray[Any]]) -> None:
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


def read(file: IO[bytes]) -> tuple[Any, list[npt.NDArray[Any]]]:
    """Return what `write` was given.

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
        check_version(file.name, header["version"], _VERSION)
        return header["tree"], [_read_array(archive, i) for i in range(header["arrays"])]


def _read_array(archive: zipfile.ZipFile, number: int) -> npt.NDArray[Any]:
    name = f"{number}.npy"
    size = archive.getinfo(name).file_size
    with archive.open(name) as member:
        array: npt.NDArray[Any] = np.lib.format.read_array(
            member, allow_pickle=False, max_header_size=size
        )
        # zipfile compares the checksum only after the last byte, so read to the end.
        if member.read(1):
            raise ValueError(f"{name} is longer than its array")
    return array
