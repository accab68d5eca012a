"""One accelerator for each rank, or its share of the cores."""

from __future__ import annotations

import os

import torch

from hvdlite.recipe.resources import local_device_index, threads_per_rank


def pin_device() -> torch.device:
    """Bind this process to the accelerator of its local rank, and return it; collective.

    Without accelerators it is the CPU, and torch is told to use as many threads as leave
    the node's other ranks their cores (unless ``OMP_NUM_THREADS`` says how many).

    Raises:
        ValueError: the node has fewer accelerators than ranks, or only some ranks see any.
    """
    threads = threads_per_rank()
    devices = range(torch.cuda.device_count())
    index = local_device_index([str(torch.cuda.get_device_properties(i).uuid) for i in devices])
    if index is None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
