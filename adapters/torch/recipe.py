"""Parts of a recipe, by rank: an accelerator or a share of the cores, and a writer of events."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from hvdlite.recipe.rank_zero import StandIn
from hvdlite.recipe.resources import share_of_node
from hvdlite.world import world


def pin_device() -> torch.device:
    """Bind this process to the accelerator of its local rank, and return it; collective.

    Without accelerators it is the CPU, and torch is told to use as many threads as leave
    the node's other ranks their cores (unless ``OMP_NUM_THREADS`` says how many).

    Raises:
        ValueError: the node has fewer accelerators than ranks, or only some ranks see any.
    """
    devices = range(torch.cuda.device_count())
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    threads, index = share_of_node(uuids)
    if index is None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def summary_writer(log_dir: Any = None, **options: Any) -> Any:
    """Return PyTorch's writer for TensorBoard on rank 0; on the other ranks its calls do nothing.

    Scripts call it alike on all ranks. Average before writing, on all ranks::

        with hvd.summary_writer("runs") as writer:
            ...
            loss = hvd.average_metrics({"loss": loss})["loss"]
            writer.add_scalar("loss", loss, step)

    Args:
        log_dir: Folder of the event files.
        options: Other arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Returns:
        A ``SummaryWriter``, or on other ranks an object with its methods, which return None.

    Raises:
        ImportError: On all ranks: tensorboard cannot be imported.
        NotInitializedError: hvdlite is not initialized.
    """
    try:
        kind = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"hvd.summary_writer needs tensorboard, which cannot be imported ({error}); install it "
            "with `pip install tensorboard`"
        ) from error
    return kind(log_dir, **options) if world.rank() == 0 else StandIn(kind)
