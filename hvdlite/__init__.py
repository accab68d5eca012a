"""hvdlite: one training script for one process becomes one for N.

The functions here work on numpy arrays and Python objects; ``hvdlite.torch`` and
``hvdlite.tensorflow`` (in ``adapters/``) offer the same and more on the tensors of their framework.

The core, each package on top of those above it::

    world        the ranks and their nodes
    transport    shared memory, MPI, NCCL
    engine       agrees on what runs next, and runs it; a rank's death (``supervisor.py``)
    compression  how the gradients of a bucket travel
    collectives  allreduce and its like
    gradients    buckets, and when they are sent
    recipe       data, checkpoints, learning rates

``elastic``, ``virtual``, ``schedule``, ``horovod``, ``tools`` and ``launch`` are beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite import collectives, common
from hvdlite.collectives import *  # noqa: F403
from hvdlite.common import *  # noqa: F403 - what all adapters offer
from hvdlite.version import __version__ as __version__

if TYPE_CHECKING:
    from hvdlite import elastic
    from hvdlite.recipe import Checkpoint, checkpoint, shard
else:
    __getattr__, __dir__ = common.beside(
        globals(),
        elastic="hvdlite.elastic",
        **{name: f"hvdlite.recipe:{name}" for name in ("Checkpoint", "checkpoint", "shard")},
    )

__all__ = [
    *common.names,
    *collectives.__all__,
    # the recipe
    "shard",
    "checkpoint",
    "Checkpoint",
    # training
    "elastic",
]
