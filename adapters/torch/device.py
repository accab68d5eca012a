"""One accelerator for each rank, or its share of the cores."""

from __future__ import annotations

import torch
from hvdlite.recipe.device import local_device_index, threads_per_rank


def pin_device() -> torch.device:
    """Bind this process to the accelerator of its local rank, and return it; collective.

    Without accelerators it is the CPU, and torch is told to use as many threads as leave
    the node's other ranks their cores.

    Raises:
        ValueError: the node has fewer accelerators than ranks.
    """
    threads = threads_per_rank()
    devices = torch.cuda.device_count()
    if devices == 0:
        torch.set_num_threads(threads)
        return torch.device("cpu")
    index = local_device_index(devices)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
