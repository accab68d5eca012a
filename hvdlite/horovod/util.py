"""``horovod.common.util``: the helpers that scripts and other libraries import from Horovod."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hvdlite.base.arrays import slice_bounds
from hvdlite.engine import build
from hvdlite.transport.gpu import cuda

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "split_list",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that a framework is installed, which is all that hvdlite needs.

    Args:
        ext_name: for example ``"horovod.torch"``.
        ext_env_var: without effect, as the rest.
        pkg_path: see above.
        args: see above.

    Raises:
        ImportError: the framework is missing.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} needs {framework}, which is not installed; "
            f"`pip install hvdlite[{framework}]`"
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework is installed: ``"torch"``, ``"tensorflow"``."""
    known = ext_base_name in ("torch", "tensorflow")
    return known and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework sees a GPU.

    Args:
        ext_base_name: ``"torch"`` or ``"tensorflow"``. Of one that has not been imported, cupy is
            asked.
        verbose: without effect.
    """
    framework: Any = sys.modules.get(ext_base_name)
    if framework is not None and ext_base_name == "torch":
        return bool(framework.cuda.is_available())
    if framework is not None and ext_base_name == "tensorflow":
        return bool(framework.config.list_physical_devices("GPU"))
    try:
        return extension_available(ext_base_name) and cuda.Cuda().device_count() > 0
    except Exception:  # cupy without the libraries that it was built for raises what they do.
        return False


def _verbosely(built: Callable[[], _Result]) -> Callable[..., _Result]:
    """Return a query that takes Horovod's argument ``verbose``, which has no effect."""
    return functools.wraps(built)(lambda verbose=False: built())


mpi_built = _verbosely(build.mpi_built)
gloo_built = _verbosely(build.gloo_built)
nccl_built = _verbosely(build.nccl_built)
ddl_built = _verbosely(build.ddl_built)
ccl_built = _verbosely(build.ccl_built)


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within a ``with`` block; those that are None stay as they are."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)


def split_list(l: Sequence[_Item], n: int) -> list[Sequence[_Item]]:  # noqa: E741 - Horovod's name
    """Split a list into n parts in order; the first ones are longer by one where n is uneven."""
    return [l[begin:end] for begin, end in itertools.pairwise(slice_bounds(len(l), n))]
