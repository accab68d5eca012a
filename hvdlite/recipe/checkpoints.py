"""Checkpoints of the training state, on the disk of rank 0.

The suffix of the path selects the format that is written: ``.pt`` and ``.pth`` (``torch.save``; the
PyTorch adapter), ``.safetensors``, and npz for all others. A file is read by its content.
"""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from hvdlite import collectives
from hvdlite.base import files
from hvdlite.errors import CheckpointError, HorovodInternalError
from hvdlite.observe.failures import chain
from hvdlite.recipe import _formats
from hvdlite.recipe._tree import flatten, unflatten
from hvdlite.recipe.rank_zero import portable
from hvdlite.world import world

_log = logging.getLogger("hvdlite")

_Result = TypeVar("_Result")
_Arrays = list[npt.NDArray[Any]]

_REQUIRED: Any = object()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ZIP_MAGIC = b"PK\x03\x04"
#: Suffixes of files for ``torch.load``.
TORCH_SUFFIXES = (".pt", ".pth")
# What threads write, by the file: another object for it must not overtake the one before.
_writing: dict[str, Future[None]] = {}
os.register_at_fork(after_in_child=_writing.clear)  # a child lacks the threads


class Checkpoint:
    """One checkpoint file, read and written by rank 0 alone; made by `checkpoint`.

    Every method is collective: all ranks call it, and an error on rank 0 is raised on all. If rank
    0 dies meanwhile, and the others go on without it, the new rank 0 does its work again.
    A subclass that takes further types converts them to these in `_encode`, and back in
    `_decode`.
    """

    # The only key of the dicts by which a subclass tells tensors from arrays; empty: it does not.
    _tensor_key = ""

    def __init__(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint {path}: keep is {keep}, expected at least 1")
        self.path = Path(path)
        self.keep = keep

    def exists(self) -> bool:
        """Return on all ranks whether rank 0 finds the file."""
        return _on_rank_zero(self._exists, "checkpoint.exists")

    def save(self, state: Any, blocking: bool = True) -> None:
        """Write the state of rank 0 in the format that the path's suffix selects.

        A failure, or the end of the process at any moment, leaves the previous file.

        Args:
            state: A tree of dicts (keys: str, int, float, bool, None), lists, tuples, None,
                bool, int, float, str, bytes, numpy scalars and numpy arrays of any dtype but
                object. Only rank 0's counts; the others may pass None, but not under
                ``hvdliterun --elastic``, where one of them may take its place. ``.safetensors``
                holds fewer dtypes.
            blocking: If False, return when rank 0 has copied the state, which takes as much host
                memory as the file; a thread writes the copy. Later changes of the state do not
                count. The next call of a method for the same path, and the end of the process, wait
                for the thread. If rank 0 dies before the thread has ended, the previous file stays.

        Raises:
            TypeError: The tree holds another type; the message says where.
            CheckpointError: The file cannot be written, or a rank that has taken the place of a
                dead rank 0 passes None. With ``blocking=False`` the next call raises what the
                thread could not do, and a failure that no call has raised is logged at exit.
        """
        _on_rank_zero(lambda: self._write(state, blocking), "checkpoint.save")

    def load(self, default: Any = _REQUIRED) -> Any:
        """Read the file on rank 0 and return an equal tree on every rank.

        If the file is damaged, the newest readable generation before it is loaded, and rank 0 logs
        a warning that names both.

        Args:
            default: Returned if the file does not exist.

        Raises:
            CheckpointError: The file does not exist and there is no default, or it is damaged,
                cut off, of an unknown format, or of another version, as are all generations
                before it.
            HorovodInternalError: Rank 0 has died after it has read the file, and before all others
                had the arrays; on all ranks.
        """
        if default is not _REQUIRED and not self.exists():
            return default
        read: _Arrays = []  # stays empty on the other ranks

        def read_here() -> tuple[Any, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
            structure, read[:] = self._read_newest()
            return structure, [(array.dtype, array.shape) for array in read]

        structure, layouts = _on_rank_zero(read_here, "checkpoint.load")
        arrays = read or [np.empty(shape, dtype) for dtype, shape in layouts]
        for number, array in enumerate(arrays):
            # As bytes, because a checkpoint may hold dtypes that no transport knows; and in place,
            # because it may be large. Rank 0's own is copied if it is not in C order.
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            name = f"checkpoint.load.{number}"
            collectives.synchronize(collectives.broadcast_async(flat, 0, name, out=flat))

        def check() -> None:
            if arrays is not read:
                raise HorovodInternalError(
                    f"{self.path}: the rank that has read it died before it had sent all of it; "
                    "load it again"
                )

        if arrays:
            _on_rank_zero(check, "checkpoint.load.end")
        return self._decode(unflatten(structure, arrays))

    def _encode(self, state: Any) -> Any:
        """Return the tree to write; called on rank 0, where it may raise."""
        return state

    def _decode(self, tree: Any) -> Any:
        """Return the state for the tree in the file; called on every rank."""
        return tree

    def _exists(self) -> bool:
        self._wait()
        with _explained(self.path, "found"):
            return self.path.exists()

    def _write(self, state: Any, blocking: bool = True) -> None:
        self._wait()
        if state is None and (first := world.current().ids[0]) != 0:
            raise CheckpointError(
                f"{self.path} cannot be written: rank 0, which had the state, has died, and rank "
                f"{first} of the start, which has taken its place, passed None; with --elastic, "
                "pass the state on all ranks"
            )
        with _explained(self.path, "written"):
            write = self._writer(state, copied=not blocking)
        if blocking:
            self._replace(write)
            return
        # The interpreter waits for the thread before it ends.
        executor = ThreadPoolExecutor(1, "hvdlite-checkpoint")
        _writing[os.path.realpath(self.path)] = executor.submit(self._replace, write)
        executor.shutdown(wait=False)

    def _replace(self, write: Callable[[IO[bytes]], object]) -> None:
        with _explained(self.path, "written"):
            try:
                with files.replacing(self.path, self.keep) as file:
                    write(file)
            except Exception as error:
                # ``torch.save`` raises errors of its own while it handles the system's.
                causes = [each for each in chain(error) if isinstance(each, OSError)]
                reasons = [each.strerror for each in causes if each.errno in _NO_ROOM]
                if not reasons:
                    raise
                counted = _Size()
                write(counted)  # type: ignore[arg-type]
                raise CheckpointError(
                    f"{self.path} cannot be written on the host of rank 0: {reasons[0]}: the file "
                    f"needs {counted.size / 1e6:.1f} MB beside the previous one, which is "
                    "unchanged; make room, or choose a path on another disk"
                ) from error

    def _wait(self) -> None:
        writing = _writing.pop(os.path.realpath(self.path), None)
        if writing is not None:
            writing.result()

    def _writer(self, state: Any, copied: bool = False) -> Callable[[IO[bytes]], object]:
        """Check the state, and return the function that writes it, or a copy, into an open file."""
        if self.path.suffix in TORCH_SUFFIXES:
            raise CheckpointError(
                f"{self.path} would be a file for torch.load: use hvdlite.torch.checkpoint(), or "
                "name it .npz or .safetensors"
            )
        structure, arrays, paths = flatten(self._encode(state))
        if copied:
            arrays = [array.copy(order="K") for array in arrays]
        if self.path.suffix == ".safetensors":
            named = _formats.named(arrays, paths, self._tensor_key)
            return lambda file: _formats.write_safetensors(file, structure, named)
        return lambda file: _formats.write_npz(file, structure, arrays)

    def _read_newest(self) -> tuple[Any, _Arrays]:
        """Return the structure and the arrays of the newest readable generation."""
        self._wait()
        try:
            return self._read_file(self.path)
        except CheckpointError as failure:
            # Without the file, the user wants to start over: a save never leaves this state.
            for generation in files.previous_generations(self.path) if self.path.exists() else ():
                try:
                    content = self._read_file(generation)
                except CheckpointError:
                    continue
                _log.warning("%s; loaded the generation before it, %s", failure, generation)
                return content
            raise

    def _read_file(self, path: Path) -> tuple[Any, _Arrays]:
        with _explained(path, "read"):
            if not path.exists():
                raise CheckpointError(
                    f"{path} does not exist on the host of rank 0: check the path, or pass "
                    "default=... to begin without a checkpoint"
                )
            with open(path, "rb") as file:
                return self._read(file)

    def _read(self, file: IO[bytes]) -> tuple[Any, _Arrays]:
        """Return the structure and the arrays of a file, whose content tells its format."""
        start = file.read(9)
        file.seek(0)
        if not start:
            raise CheckpointError(f"{file.name} is empty, not a checkpoint")
        is_zip = start.startswith(_ZIP_MAGIC)
        if not is_zip and start[8:] != b"{":
            raise CheckpointError(
                f"{file.name} is not a checkpoint of hvdlite: it begins with {start[:4]!r}, "
                f"expected {_ZIP_MAGIC!r} or a safetensors header"
            )
        try:
            if not is_zip:
                structure, arrays = _formats.read_safetensors(file, self._tensor_key)
            elif _is_from_torch(file):
                structure, arrays = self._read_torch(file)
            else:
                structure, arrays = _formats.read_npz(file)
            unflatten(structure, arrays)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{file.name} is damaged or cut off ({type(error).__name__}: {error}); load "
                "another checkpoint"
            ) from error
        return structure, arrays

    def _read_torch(self, file: IO[bytes]) -> tuple[Any, _Arrays]:
        raise CheckpointError(
            f"{file.name} was written by torch.save: load it with hvdlite.torch.checkpoint()"
        )


@atexit.register
def _report() -> None:
    for writing in _writing.values():
        if (failure := writing.exception()) is not None:
            _log.error("%s", failure)


class _Size(io.RawIOBase):
    """A file that counts the bytes written to it, and keeps none."""

    size = 0

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self.size += written
        return written


def _is_from_torch(file: IO[bytes]) -> bool:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    file.seek(0)
    return _formats.STRUCTURE not in names and any(name.endswith("/data.pkl") for name in names)


def checkpoint(path: str | os.PathLike[str], keep: int = 1) -> Checkpoint:
    """Return the checkpoint at ``path``, to be saved and loaded by all ranks together.

    Args:
        path: The file, on the host of rank 0, or a symbolic link to it. It need not exist; if it
            does, its permissions are kept. ``.safetensors`` is written as a safetensors file, other
            suffixes as npz; `hvdlite.torch.checkpoint` writes ``.pt`` and ``.pth`` as
            ``torch.save`` does. A file is read by its content.
        keep: How many generations remain: the file itself, and its predecessors as
            ``PATH.generation-NUMBER``, which `Checkpoint.load` uses if the file is damaged.

    Raises:
        ValueError: ``keep`` is less than 1.

    Example::

        saved = checkpoint("digits.npz")
        state = saved.load(default={"epoch": 0, "weights": weights})
        saved.save({"epoch": state["epoch"] + 1, "weights": weights})
    """
    return Checkpoint(path, keep)


def _on_rank_zero(action: Callable[[], _Result], name: str) -> _Result:
    """Run the action on rank 0; on every rank, return its result or raise its error.

    If rank 0 dies before the others have the outcome, the new rank 0 runs the action again.
    """
    outcome = None
    while outcome is None:
        own: tuple[Any, Exception | None] | None = None
        if world.rank() == 0:
            try:
                own = action(), None
            except Exception as error:  # the other ranks wait
                own = None, portable(error)
        # Not a broadcast, which is lost with its root. A rank that comes after the death may have
        # run the action already, as the new rank 0; else no rank has, and all of them see that.
        gathered = collectives.allgather_object(own, name=name)
        outcome = own or next((each for each in gathered if each is not None), None)
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast(_Result, result)


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be {done} on the host of rank 0: {type(error).__name__}: {error}"
        ) from error
