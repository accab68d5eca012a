"""For graphs that a ``tf.compat.v1.Session`` runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.tensorflow.graphs import for_session
from hvdlite.tensorflow.state import broadcast_variables


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that overwrites all global variables with those of rank ``root_rank``.

    It is for graphs: TensorFlow 2 has no global variables. Those count that the graph has now, so
    call it when the model and its optimizer are complete; run it after the initializers.

    Args:
        root_rank: the rank whose values count.

    Raises:
        RuntimeError: in eager mode and inside ``tf.function``.
        ValueError: there is no such rank; when it runs, as what follows.
        MismatchError: the ranks disagree on names, shapes or dtypes.
        HorovodInternalError: communication failed.
    """
    if not for_session():
        raise RuntimeError(
            "broadcast_global_variables needs the global variables of a graph for a "
            "tf.compat.v1.Session, which TensorFlow 2 has not; call "
            "hvd.broadcast_variables(model.variables, root_rank=0), and the same for "
            "optimizer.variables, when both are built and before the first step"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Has a ``MonitoredTrainingSession`` broadcast all global variables when it begins.

    Weights that rank 0 has initialized or restored from a checkpoint are then those of all ranks.

    Args:
        root_rank: the rank whose values count.
        device: accepted for Horovod's sake, without effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Make the operation, in the graph that the session is about to have.

        Raises:
            RuntimeError: in eager mode.
        """
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast."""
        session.run(self.bcast_op)
