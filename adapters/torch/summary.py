"""Events for TensorBoard, written by rank 0 alone."""

from __future__ import annotations

import importlib
from typing import Any

from hvdlite.recipe.rank_zero import StandIn
from hvdlite.world import world


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
