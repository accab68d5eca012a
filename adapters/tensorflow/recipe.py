"""Parts of a recipe, by rank: an accelerator or a share of the cores, and a writer of events."""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf

from hvdlite.recipe.resources import share_of_node
from hvdlite.world import world

_log = logging.getLogger("hvdlite")


def pin_device() -> tf.config.PhysicalDevice:
    """Bind this process to the accelerator of its local rank, and return it; collective.

    TensorFlow allocates its memory as needed. Without accelerators the device is the CPU, and
    TensorFlow gets this rank's share of the node's cores as threads, unless the program has set
    a number. Call it right after ``init()``: TensorFlow fixes its devices and threads when it runs
    its first operation.

    Raises:
        ValueError: The node has fewer accelerators than ranks, or only some ranks see any.
        RuntimeError: TensorFlow has initialised all accelerators already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    threads, index = share_of_node(_identities(gpus))
    if index is None:
        _set_threads(threads)
        return tf.config.list_physical_devices("CPU")[0]
    gpu = gpus[index]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {world.rank()}: TensorFlow has initialised its GPUs before hvd.pin_device() "
            f"({error}); call hvd.init() and hvd.pin_device() before anything else of TensorFlow"
        ) from error
    return gpu


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU; the arguments have no effect, as in Horovod."""
    return bool(tf.config.list_physical_devices("GPU"))


def summary_writer(log_dir: Any, **options: Any) -> tf.summary.SummaryWriter:
    """Return a writer of ``tf.summary`` on rank 0, and one that does nothing on the other ranks.

    Scripts call it alike on all ranks. Average before writing, on all ranks::

        writer = hvd.summary_writer("logs")
        with writer.as_default(step=step):
            tf.summary.scalar("loss", hvd.allreduce(loss))

    Args:
        log_dir: Folder of the event files.
        options: Other arguments of ``tf.summary.create_file_writer``.

    Raises:
        NotInitializedError: hvdlite is not initialized.
    """
    if world.rank() == 0:
        return tf.summary.create_file_writer(str(log_dir), **options)
    return tf.summary.create_noop_writer()


def _set_threads(threads: int) -> None:
    threading = tf.config.threading
    try:
        if threading.get_intra_op_parallelism_threads() == 0:
            threading.set_intra_op_parallelism_threads(threads)
        if threading.get_inter_op_parallelism_threads() == 0:
            # An exchange inside tf.function blocks one thread while others compute.
            threading.set_inter_op_parallelism_threads(max(2, threads))
    except RuntimeError:
        _log.info(
            "rank %d: TensorFlow had started before hvd.pin_device(); its threads stay as they "
            "are (%d would leave the other ranks of this node their cores)",
            world.rank(),
            threads,
        )


def _identities(gpus: list[tf.config.PhysicalDevice]) -> list[str]:
    """Return names that are unique among the accelerators of a node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[: len(gpus)] if visible else [gpu.name for gpu in gpus]
