"""Checkpoint files: numpy's npz, which ``np.load`` opens too, plus one member of JSON.

``structure.json`` holds the format's name and version and the tree; its arrays are the
members ``0.npy``, ``1.npy`` and so on. zip gives every member a CRC-32. Nothing is pickled.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hvdlite import files
from hvdlite.errors import CheckpointError

_FORMAT = "hvdlite checkpoint"
_VERSION = 1
_STRUCTURE = "structure.json"
_ZIP_MAGIC = b"PK\x03\x04"


def write(path: Path, structure: Any, arrays: list[npt.NDArray[Any]]) -> None:
    """Write a checkpoint so that ``path`` is at every moment either the old or the new file.

    Args:
        path: The file. Missing parent folders are made.
        structure: What ``json`` can write.
        arrays: Of any shape and strides; written in pieces, without a copy of the whole.

    Raises:
        OSError: The file cannot be written; the previous one is as it was.
    """
    with files.replacing(path) as file:
        _write_members(file, structure, arrays)


def _write_members(file: IO[bytes], structure: Any, arrays: list[npt.NDArray[Any]]) -> None:
    header = {"format": _FORMAT, "version": _VERSION, "arrays": len(arrays), "tree": structure}
    with zipfile.ZipFile(file, "w") as archive:
        # ZipInfo with no date: equal states give equal files.
        archive.writestr(zipfile.ZipInfo(_STRUCTURE), json.dumps(header, allow_nan=False))
        for number, array in enumerate(arrays):
            member_info = zipfile.ZipInfo(f"{number}.npy")
            with archive.open(member_info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, version=(3, 0), allow_pickle=False)


def read(path: Path) -> tuple[Any, list[npt.NDArray[Any]]]:
    """Read what `write` wrote.

    Raises:
        CheckpointError: The file is empty, foreign, damaged or of another version.
        OSError: The file cannot be opened.
    """
    with open(path, "rb") as file:
        start = file.read(len(_ZIP_MAGIC))
        if not start:
            raise CheckpointError(f"{path} is empty, not a checkpoint")
        if start != _ZIP_MAGIC:
            raise CheckpointError(
                f"{path} is not a checkpoint of hvdlite: it begins with {start!r}, "
                f"expected {_ZIP_MAGIC!r}"
            )
        try:
            with zipfile.ZipFile(file) as archive:
                header = _read_header(archive, path)
                return header["tree"], [_read_array(archive, i) for i in range(header["arrays"])]
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # zipfile and numpy raise a dozen kinds on damaged bytes
            raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file whose content makes no sense."""
    return CheckpointError(
        f"{path} is damaged or cut off ({type(error).__name__}: {error}); load another checkpoint"
    )


def _read_header(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    if _STRUCTURE not in archive.namelist():
        raise CheckpointError(
            f"{path} is not a checkpoint of hvdlite: a zip file without {_STRUCTURE} "
            f"(it has {', '.join(archive.namelist()[:3]) or 'nothing'})"
        )
    header = json.loads(archive.read(_STRUCTURE))
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of hvdlite: {_STRUCTURE} lacks the format {_FORMAT!r}"
        )
    if header["version"] != _VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {header['version']!r}, this hvdlite reads version "
            f"{_VERSION}: load it with the hvdlite that wrote it"
        )
    return header


def _read_array(archive: zipfile.ZipFile, number: int) -> npt.NDArray[Any]:
    name = f"{number}.npy"
    size = archive.getinfo(name).file_size
    with archive.open(name) as member:
        array: npt.NDArray[Any] = np.lib.format.read_array(
            member, allow_pickle=False, max_header_size=size
        )
        # zipfile compares the checksum when it has read the last byte, so read it.
        if member.read(1):
            raise ValueError(f"{name} is longer than its array")
    return array
