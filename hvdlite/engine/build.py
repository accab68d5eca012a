"""Horovod's queries for the features of an installation."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from hvdlite.world import world

if TYPE_CHECKING:
    from hvdlite.transport.gpu.cuda import Cuda


def mpi_threads_supported() -> bool:
    """Return whether MPI allows calls from several threads.

    Raises:
        NotInitializedError: before ``init()`` (a ``ValueError``).
    """
    world.current()
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether MPI connects the ranks; always, if it is installed."""
    return mpi_built()


def mpi_built() -> bool:
    """Return whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Return False: hvdlite does not use gloo."""
    return False


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return NCCL's version code, e.g. 22707; 0 without a usable NCCL."""
    cuda = _cuda()
    return 0 if cuda is None else cuda.nccl_version()


def ddl_built() -> bool:
    """Return False: hvdlite does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: hvdlite does not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether cupy for CUDA is installed, with or without a device."""
    cuda = _cuda()
    return cuda is not None and not cuda.is_rocm()


def rocm_built() -> bool:
    """Return whether cupy for ROCm is installed."""
    cuda = _cuda()
    return cuda is not None and cuda.is_rocm()


def _cuda() -> Cuda | None:
    from hvdlite.transport.gpu.cuda import Cuda

    try:
        return Cuda()
    except Exception:  # cupy without the libraries it was built for raises what they do.
        return None
