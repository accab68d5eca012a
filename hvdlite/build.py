"""What this installation can do: Horovod's queries, which scripts ask before they choose."""

from __future__ import annotations

import importlib.util

from hvdlite import world
from hvdlite.transport.gpu.cuda import Cuda


def mpi_threads_supported() -> bool:
    """Whether MPI allows calls from several threads.

    Raises:
        NotInitializedError: before ``init()`` (a ``ValueError``).
    """
    world.current()
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether ranks are joined by MPI, as they always are."""
    return mpi_built()


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """False: hvdlite does not use gloo."""
    return False


def gloo_built() -> bool:
    """False: hvdlite does not use gloo."""
    return False


def nccl_built() -> int:
    """NCCL's version code, e.g. 22707; 0 without an NCCL that can be used."""
    cuda = _cuda()
    return 0 if cuda is None else cuda.nccl_version()


def ddl_built() -> bool:
    """False: hvdlite does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """False: hvdlite does not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether cupy for CUDA is installed; this machine may have no device all the same."""
    cuda = _cuda()
    return cuda is not None and not cuda.is_rocm()


def rocm_built() -> bool:
    """Whether cupy for ROCm is installed."""
    cuda = _cuda()
    return cuda is not None and cuda.is_rocm()


def _cuda() -> Cuda | None:
    try:
        return Cuda()
    except Exception:  # cupy without the libraries it was built for raises what they do.
        return None
