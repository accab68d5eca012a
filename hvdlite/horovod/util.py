"""``horovod.common.util``: helpers that other libraries import from Horovod."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hvdlite import build
from hvdlite.arrays import slice_bounds
from hvdlite.build import (
    cuda_built,
    gloo_enabled,
    mpi_enabled,
    mpi_threads_supported,
    rocm_built,
)
from hvdlite.transport.gpu import cuda

__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

EXTENSIONS = ["tensorflow", "torch"]
"""The frameworks that Horovod would have an extension for."""


def get_ext_suffix() -> str:
    """Return the suffix of extension modules' file names."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where Horovod would look for an extension; hvdlite has none.

    Raises:
        ValueError: No name is given.
    """
    if not args:
        raise ValueError("get_extension_full_path() takes the name of an extension, too")
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that a framework is installed, which is all that hvdlite needs.

    Args:
        ext_name: For example ``"horovod.torch"``.
        ext_env_var: Without effect, as the rest.
        pkg_path: See above.
        args: See above.

    Raises:
        ImportError: The framework is missing.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} needs {framework}, which is not installed; "
            f"`pip install hvdlite[{framework}]`"
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework is installed: ``"torch"``, ``"tensorflow"``."""
    return ext_base_name in EXTENSIONS and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework sees a GPU.

    Args:
        ext_base_name: ``"torch"`` or ``"tensorflow"``. Of one that has not been imported, cupy is
            asked.
        verbose: Without effect.
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

    def query(verbose: bool = False) -> _Result:
        return built()

    query.__name__, query.__doc__ = built.__name__, built.__doc__
    return query


mpi_built = _verbosely(build.mpi_built)
gloo_built = _verbosely(build.gloo_built)
nccl_built = _verbosely(build.nccl_built)
ddl_built = _verbosely(build.ddl_built)
ccl_built = _verbosely(build.ccl_built)


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within a ``with`` block; those that are None stay as they are."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """Return a function that makes one operation of the arguments ``op`` and ``average``.

    Args:
        reduce_ops: Has the attributes ``Average`` and ``Sum``.
    """

    def choose(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError(f"op={op!r} and average={average!r}: give only op")
        if average is None:
            return reduce_ops.Average if op is None else op
        warnings.warn("average= is deprecated: use op=", DeprecationWarning, stacklevel=3)
        return reduce_ops.Average if average else reduce_ops.Sum

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[_Item], n: int) -> list[Sequence[_Item]]:  # noqa: E741 - Horovod's name
    """Split a list into n parts in order; the first ones are longer by one where n is uneven."""
    return [l[begin:end] for begin, end in itertools.pairwise(slice_bounds(len(l), n))]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message of a `HorovodVersionMismatchError`."""
    return f"{name} is of version {version}, but Horovod was installed for {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """A framework of another version than Horovod was installed for; hvdlite never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        message = get_version_mismatch_message(name, version, installed_version)
        super().__init__(message, name=name)
        self.version = version
        self.installed_version = installed_version


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: hvdlite is not built for one version of a framework."""


def is_iterable(x: Any) -> bool:
    """Return whether one can iterate over an object."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least another; a pre-release comes before its release.

    Args:
        ver: For example ``"2.13.0+cpu"``.
        target: Of the form major.minor.patch.

    Raises:
        ValueError: One of them is not a string, is no version, or the target has another form.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are strings; found {ver!r} and {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"target={target!r}: expected major.minor.patch")
    return _version(ver) >= _version(target)


def _version(text: str) -> tuple[tuple[int, ...], bool]:
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)[._-]?(a|b|c|rc|alpha|beta|pre|dev)?", text)
    if found is None:
        raise ValueError(f"{text!r} is no version")
    numbers = [int(number) for number in found[1].split(".")]
    while numbers and numbers[-1] == 0:  # 2.0 is 2.0.0
        numbers.pop()
    return tuple(numbers), found[2] is None
