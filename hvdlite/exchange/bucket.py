"""A bucket: the gradients of several parameters as one flat array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import Transport, slices


@dataclass(frozen=True)
class Parameter:
    """What is known of a parameter before it has a gradient.

    Attributes:
        name: unique within its model, and the same on all ranks.
        shape: of its gradient.
        dtype: of its gradient, as numpy's (``ml_dtypes`` has bfloat16).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Reduction:
    """What becomes of the gradients: a sum, an average (with Horovod's predivision), or Adasum.

    An average over n ranks with ``predivide`` f is a sum of gradients divided by f that is
    multiplied by f/n: it moves a part of the division before the sum.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
            raise ValueError(
                "gradients are reduced by hvd.Average, hvd.Sum or hvd.Adasum, not "
                f"{self.op.name.capitalize()}"
            )
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=hvd.Average")
        if not self.predivide > 0:
            raise ValueError(f"gradient_predivide_factor={self.predivide} is not a number above 0")

    @property
    def before(self) -> Scaling:
        """The scaling before the sum."""
        return Scaling(1.0 / self.predivide)

    def after(self, size: int) -> Scaling:
        """The scaling after the sum over ``size`` ranks."""
        if self.op is not ReduceOp.AVERAGE:
            return Scaling()
        return Scaling(self.predivide, size)

    def whole(self, size: int) -> Scaling:
        """Both together, for those that scale once."""
        return Scaling(1.0, size) if self.op is ReduceOp.AVERAGE else Scaling()


class Bucket:
    """The send and the result array of some parameters of one dtype.

    An exchange reads ``send`` and writes ``result``: the gradients stay as they were until
    the step is done.

    Args:
        parameters: in their order within the arrays.
        reduction: what the exchange computes.
        empty: makes a flat array of so many elements of a dtype.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        reduction: Reduction,
        empty: Callable[[int, np.dtype[Any]], Any] = np.empty,
    ) -> None:
        self.parameters = tuple(parameters)
        self.reduction = reduction
        self._empty = empty
        bounds = np.cumsum([0, *(parameter.size for parameter in parameters)])
        self._bounds = [int(bound) for bound in bounds]
        self.send = empty(self._bounds[-1], parameters[0].dtype)
        self.renew()

    def renew(self) -> None:
        """Get another array for the result: the one before is its users' as long as they like."""
        self.result: Any = None  # its memory may be what comes back
        self.result = self._empty(self._bounds[-1], self.parameters[0].dtype)

    def reduce(self, transport: Transport, send: Any, result: Any, scaling: Scaling) -> None:
        """Write ``scaling.apply(the reduction of all ranks' send)`` into ``result``.

        Args:
            transport: of the ranks.
            send: flat, of as many elements as the bucket, of any float type.
            result: likewise, of the same type; it may be ``send``.
            scaling: applied after the reduction.
        """
        if self.reduction.op is ReduceOp.ADASUM:
            slices.adasum(transport, send, result, scaling, self._bounds)
        else:
            transport.allreduce(send, result, ReduceOp.SUM, scaling)

    def send_slot(self, position: int) -> Any:
        """The part of ``send`` that belongs to a parameter, in the parameter's shape."""
        return self._slot(self.send, position)

    def result_slot(self, position: int) -> Any:
        """The part of ``result`` that belongs to a parameter, in the parameter's shape."""
        return self._slot(self.result, position)

    def _slot(self, array: Any, position: int) -> Any:
        start, stop = self._bounds[position : position + 2]
        return array[start:stop].reshape(self.parameters[position].shape)
