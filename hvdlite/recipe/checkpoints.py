"""Checkpoints of the training state, on the disk of rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdlite import collectives, world
from hvdlite.errors import CheckpointError
from hvdlite.recipe import _archive
from hvdlite.recipe._tree import flatten, unflatten

_Result = TypeVar("_Result")
_Arrays = list[npt.NDArray[Any]]

_REQUIRED: Any = object()


class Checkpoint:
    """One checkpoint file, read and written by rank 0 alone; made by `checkpoint`.

    Every method is collective: all ranks call it, and an error on rank 0 is raised on all.
    A subclass that takes further types turns them into these in `_encode`, and back in
    `_decode`.

    Args:
        path: The file, on the host of rank 0.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Return on all ranks whether rank 0 finds the file."""
        return _on_rank_zero(self._exists, "checkpoint.exists")

    def save(self, state: Any) -> None:
        """Write the state of rank 0, in place of what the file held before.

        A failure, or the end of the process at any moment, leaves the previous file.

        Args:
            state: A tree of dicts (keys: str, int, float, bool, None), lists, tuples, None,
                bool, int, float, str, bytes, numpy scalars and numpy arrays of any dtype but
                object. Only rank 0's counts; the others may pass None.

        Raises:
            TypeError: Something else is in the tree; the message says where.
            CheckpointError: The file cannot be written.
        """
        _on_rank_zero(lambda: self._write(state), "checkpoint.save")

    def load(self, default: Any = _REQUIRED) -> Any:
        """Read the file on rank 0 and return an equal tree on every rank.

        Args:
            default: What to return if there is no such file.

        Raises:
            CheckpointError: No such file and no default, or the file is damaged, cut off,
                foreign, or of another version.
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
        """Return the tree that the file is to hold; called on rank 0, where it may raise."""
        return state

    def _decode(self, tree: Any) -> Any:
        """Return what `load` is to return for the tree in the file; called on every rank."""
        return tree

    def _exists(self) -> bool:
        with _explained(self.path, "found"):
            return self.path.exists()

    def _write(self, state: Any) -> None:
        with _explained(self.path, "written"):
            _archive.write(self.path, *flatten(self._encode(state)))

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
            structure, found = _archive.read(self.path)
            try:
                unflatten(structure, found)
            except Exception as error:
                raise _archive.damaged(self.path, error) from error
        arrays.extend(found)
        return structure, [(array.dtype, array.shape) for array in found]


def checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together.

    Args:
        path: The file, on the host of rank 0. It need not exist.

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
        except Exception as error:  # the others wait for the outcome, whatever it is
            failure = error
    received, remote_failure = collectives.broadcast_object((result, failure), name=name)
    if failure or remote_failure:
        raise failure or remote_failure
    return received  # type: ignore[no-any-return]


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    """Turn what the system may raise into an error that names the file."""
    try:
        yield
    except (TypeError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be {done} on the host of rank 0: {type(error).__name__}: {error}"
        ) from error


def _fill(array: npt.NDArray[Any], name: str) -> None:
    """Overwrite the array, on all ranks, with the bytes of rank 0's."""
    # As bytes, because a checkpoint may hold dtypes that no transport knows; and in
    # place, because it may be large. Rank 0's own is copied if it is not in C order.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    collectives.synchronize(collectives.broadcast_async(flat, 0, name, out=flat))
