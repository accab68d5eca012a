"""Events for TensorBoard, written by rank 0 alone."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.world import world


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
