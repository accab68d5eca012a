"""Checkpoints of the training state, on the disk of rank 0.

The suffix of the path selects the format that is written: ``.pt`` and ``.pth`` (``torch.save``; the
PyTorch adapter), ``.safetensors``, and npz for all others. A file is read by its content.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdlite import collectives, files, world
from hvdlite.errors import CheckpointError
from hvdlite.recipe import _npz, _safetensors
from hvdlite.recipe._tree import flatten, unflatten

_Result = TypeVar("_Result")
_Arrays = list[npt.NDArray[Any]]

_REQUIRED: Any = object()
_ZIP_MAGIC = b"PK\x03\x04"
#: Suffixes of files for ``torch.load``.
TORCH_SUFFIXES = (".pt", ".pth")


class Checkpoint:
    """One checkpoint file, read and written by rank 0 alone; made by `checkpoint`.

    Every method is collective: all ranks call it, and an error on rank 0 is raised on all.
    A subclass that takes further types converts them to these in `_encode`, and back in
    `_decode`.

    Args:
        path: The file, on the host of rank 0.
    """

    # The only key of the dicts by which a subclass tells tensors from arrays; empty: it does not.
    _tensor_key = ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Return on all ranks whether rank 0 finds the file."""
        return _on_rank_zero(self._exists, "checkpoint.exists")

    def save(self, state: Any) -> None:
        """Write the state of rank 0 in the format that the path's suffix selects.

        A failure, or the end of the process at any moment, leaves the previous file.

        Args:
            state: A tree of dicts (keys: str, int, float, bool, None), lists, tuples, None,
                bool, int, float, str, bytes, numpy scalars and numpy arrays of any dtype but
                object. Only rank 0's counts; the others may pass None. ``.safetensors`` holds
                fewer dtypes.

        Raises:
            TypeError: The tree holds another type; the message says where.
            CheckpointError: The file cannot be written.
        """
        _on_rank_zero(lambda: self._write(state), "checkpoint.save")

    def load(self, default: Any = _REQUIRED) -> Any:
        """Read the file on rank 0 and return an equal tree on every rank.

        Args:
            default: Returned if the file does not exist.

        Raises:
            CheckpointError: The file does not exist and there is no default, or it is damaged,
                cut off, of an unknown format, or of another version.
        """
        if default is not _REQUIRED and not self.exists():
            return default
        arrays: _Arrays = []
        structure, layouts = _on_rank_zero(lambda: self._read_into(arrays), "checkpoint.load")
        if world.rank() != 0:
            arrays = [np.empty(shape, dtype) for dtype, shape in layouts]
        for number, array in enumerate(arrays):
            _fill(array, f"checkpoint.load.{number}")
        return self._decode(unflatten(structure, arrays))

    def _encode(self, state: Any) -> Any:
        """Return the tree to write; called on rank 0, where it may raise."""
        return state

    def _decode(self, tree: Any) -> Any:
        """Return the state for the tree in the file; called on every rank."""
        return tree

    def _exists(self) -> bool:
        with _explained(self.path, "found"):
            return self.path.exists()

    def _write(self, state: Any) -> None:
        with _explained(self.path, "written"):
            write = self._writer(state)
            with files.replacing(self.path) as file:
                write(file)

    def _writer(self, state: Any) -> Callable[[IO[bytes]], None]:
        """Check the state, and return the function that writes it into an open file."""
        if self.path.suffix in TORCH_SUFFIXES:
            raise CheckpointError(
                f"{self.path} would be a file for torch.load: use hvdlite.torch.checkpoint(), or "
                "name it .npz or .safetensors"
            )
        structure, arrays = flatten(self._encode(state))
        if self.path.suffix == ".safetensors":
            _safetensors.check(structure, arrays, self._tensor_key)
            return lambda file: _safetensors.write(file, structure, arrays, self._tensor_key)
        return lambda file: _npz.write(file, structure, arrays)

    def _read_into(
        self, arrays: _Arrays
    ) -> tuple[Any, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
        """Read the file into ``arrays``; return the structure and the arrays' layouts."""
        with _explained(self.path, "read"):
            if not self.path.exists():
                raise CheckpointError(
                    f"{self.path} does not exist on the host of rank 0: check the path, or pass "
                    "default=... to begin without a checkpoint"
                )
            with open(self.path, "rb") as file:
                structure, found = self._read(file)
        arrays.extend(found)
        return structure, [(array.dtype, array.shape) for array in found]

    def _read(self, file: IO[bytes]) -> tuple[Any, _Arrays]:
        """Return the structure and the arrays of a file, whose content tells its format."""
        start = file.read(9)
        file.seek(0)
        if not start:
            raise CheckpointError(f"{self.path} is empty, not a checkpoint")
        is_zip = start.startswith(_ZIP_MAGIC)
        if not is_zip and start[8:] != b"{":
            raise CheckpointError(
                f"{self.path} is not a checkpoint of hvdlite: it begins with {start[:4]!r}, "
                f"expected {_ZIP_MAGIC!r} or a safetensors header"
            )
        try:
            if not is_zip:
                structure, arrays = _safetensors.read(file, self._tensor_key)
            elif _is_from_torch(file):
                structure, arrays = self._read_torch(file)
            else:
                structure, arrays = _npz.read(file)
            unflatten(structure, arrays)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.path} is damaged or cut off ({type(error).__name__}: {error}); load "
                "another checkpoint"
            ) from error
        return structure, arrays

    def _read_torch(self, file: IO[bytes]) -> tuple[Any, _Arrays]:
        """Return the structure and the arrays of a file of ``torch.save``."""
        raise CheckpointError(
            f"{self.path} was written by torch.save: load it with hvdlite.torch.checkpoint()"
        )


def _is_from_torch(file: IO[bytes]) -> bool:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    file.seek(0)
    return _npz.STRUCTURE not in names and any(name.endswith("/data.pkl") for name in names)


def checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together.

    Args:
        path: The file, on the host of rank 0. It need not exist. ``.safetensors`` is written as a
            safetensors file, other suffixes as npz; `hvdlite.torch.checkpoint` writes ``.pt`` and
            ``.pth`` as ``torch.save`` does. A file is read by its content.

    Example::

        saved = checkpoint("digits.npz")
        state = saved.load(default={"epoch": 0, "weights": weights})
        saved.save({"epoch": state["epoch"] + 1, "weights": weights})
    """
    return Checkpoint(path)


def _on_rank_zero(action: Callable[[], _Result], name: str) -> _Result:
    """Run the action on rank 0; on every rank, return its result or raise its error."""
    result, failure = None, None
    if world.rank() == 0:
        try:
            result = action()
        except Exception as error:  # the other ranks wait for the outcome
            failure = error
    received, remote_failure = collectives.broadcast_object((result, failure), name=name)
    if failure or remote_failure:
        raise failure or remote_failure
    return received  # type: ignore[no-any-return]


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    """Convert other exceptions to an error that names the file."""
    try:
        yield
    except (TypeError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be {done} on the host of rank 0: {type(error).__name__}: {error}"
        ) from error


def _fill(array: npt.NDArray[Any], name: str) -> None:
    """Overwrite the array, on all ranks, with the bytes of rank 0's array."""
    # As bytes, because a checkpoint may hold dtypes that no transport knows; and in
    # place, because it may be large. Rank 0's own is copied if it is not in C order.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    collectives.synchronize(collectives.broadcast_async(flat, 0, name, out=flat))
