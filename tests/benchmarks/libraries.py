"""Other libraries to compare with, initialised."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI


@contextlib.contextmanager
def gloo(comm: MPI.Comm) -> Iterator[Any]:
    """Provide torch.distributed on gloo over a communicator's ranks within a context."""
    import torch.distributed as dist

    own = (
        tempfile.TemporaryDirectory(prefix="gloo-") if comm.rank == 0 else contextlib.nullcontext()
    )
    with own as folder:
        store = Path(comm.bcast(folder), "store")
        dist.init_process_group("gloo", f"file://{store}", rank=comm.rank, world_size=comm.size)
        yield dist
        comm.Barrier()
        dist.destroy_process_group()


def horovod(framework: str) -> Any | None:
    """Return Horovod for ``torch`` or ``tensorflow``, initialised, or None.

    Its background thread then looks for work in each of its cycles (``HOROVOD_CYCLE_TIME``),
    also while others are timed.
    """
    try:
        module = importlib.import_module(f"horovod.{framework}")
    except (ImportError, OSError):
        return None
    module.init()
    return module
