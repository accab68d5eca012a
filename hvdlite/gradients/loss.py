"""The loss of an optimizer's closure, combined over all ranks as its gradients are."""

from __future__ import annotations

import struct

from hvdlite.base.reduction import ReduceOp
from hvdlite.engine import runtime
from hvdlite.engine.operation import Gather, Signature
from hvdlite.engine.process_sets import ProcessSet

_LOSS = struct.Struct("<dd")  # a rank's loss, and its weight


class LossExchange:
    """Combines the losses of all ranks, evaluation by evaluation.

    An optimizer that evaluates its loss several times in a step decides by it how often, and how
    far to go. With the loss of all ranks, all take the same decisions. Evaluations are numbered, so
    that ranks which differ nevertheless are found before they mix gradients of different weights.

    Args:
        label: begins the names of the operations; the same on all ranks.
        op: Average or Sum, as the gradients'.
    """

    def __init__(self, label: str, op: ReduceOp, process_set: ProcessSet) -> None:
        self._name = f"{label}: its loss"
        self._op = op
        self._process_set = process_set
        self.restart()

    def restart(self) -> None:
        """Restart the numbers of steps and evaluations after a failure; on all ranks."""
        self._step = self._evaluation = 0

    def begin_step(self) -> None:
        """Begin a step, and number its evaluations from 0."""
        self._step += 1
        self._evaluation = 0

    def combine(self, loss: float | None, weight: float) -> float | None:
        """Return the average, or the sum, of all ranks' losses, the same bits on all of them.

        Args:
            loss: of this rank; None: there is none, and ranks only compare their progress.
            weight: the factor of this rank's gradients.

        Raises:
            HorovodInternalError: the ranks are at different evaluations, only some have a loss,
                or communication failed.
        """
        self._evaluation += 1
        signature = Signature(
            (
                ("the step (which takes the same options on all ranks)", self._step),
                ("the evaluation in this step", self._evaluation),
                ("the loss that the closure returns", "no number" if loss is None else "a number"),
            )
        )
        payload = _LOSS.pack(loss or 0.0, weight)
        gather = Gather(self._name, signature, payload)
        payloads = runtime.engine(self._process_set).gradients.run(gather)
        if loss is None:
            return None
        losses = [_LOSS.unpack(each) if each else (0.0, 0.0) for each in payloads]
        total = sum((each * factor for each, factor in losses if factor), 0.0)
        if self._op is not ReduceOp.AVERAGE:
            return total
        factors = [factor for _, factor in losses]
        # Those of samples add up to the number of ranks, unless one has died since it was taken.
        is_weighted = any(factor not in (0.0, 1.0) for factor in factors)
        return total / (sum(factors) if is_weighted else len(factors))
