"""Parameters, and what becomes of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hvdlite.arguments import check_positive
from hvdlite.reduction import ReduceOp, Scaling


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
        check_positive("gradient_predivide_factor", self.predivide)

    @property
    def before(self) -> Scaling:
        """The scaling before the sum."""
        return Scaling(1.0 / self.predivide)

    def after(self, size: int) -> Scaling:
        """The scaling after the sum over ``size`` ranks."""
        if self.op is not ReduceOp.AVERAGE:
            return Scaling()
        return Scaling(self.predivide, size)

    def around(self, dtype: np.dtype[Any], size: int) -> tuple[Scaling, Scaling]:
        """Return the scaling of a dtype's elements before and after the sum over ``size`` ranks."""
        if dtype.kind in "iu":  # divided before, they would lose a remainder
            return Scaling(), self.whole(size)
        return self.before, self.after(size)

    def whole(self, size: int) -> Scaling:
        """Both together, for those that scale once."""
        return Scaling(1.0, size) if self.op is ReduceOp.AVERAGE else Scaling()
