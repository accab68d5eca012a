"""What belongs to TensorFlow 1: scripts that import it get to know what takes its place."""

from __future__ import annotations

from typing import NoReturn

_REMEDY = (
    "needs the global variables and sessions of TensorFlow 1, which TensorFlow 2 has not; call "
    "hvd.broadcast_variables(model.variables, root_rank=0), and the same for optimizer.variables, "
    "when both are built and before the first step"
)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Refuse: there are no global variables.

    Raises:
        RuntimeError: always; it says what to call instead.
    """
    raise RuntimeError(f"broadcast_global_variables {_REMEDY}")


class BroadcastGlobalVariablesHook:
    """Refuses to be made: there are no sessions to hook into.

    Raises:
        RuntimeError: always; it says what to call instead.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise RuntimeError(f"BroadcastGlobalVariablesHook {_REMEDY}")
