"""Buckets as strategies see them: gradients of several parameters as one flat array."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hvdlite.base.arguments import check_positive
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.compression.state import BucketState, StrategyState
from hvdlite.transport import Transport
from hvdlite.transport.transport import copy_parts

_UNSCALED = Scaling()


@dataclass(frozen=True)
class Parameter:
    """A parameter as it is known before it has a gradient.

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
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Reduction:
    """The reduction of gradients: a sum, an average (with Horovod's predivision), or Adasum.

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

    def scalings(self, dtype: np.dtype[Any], size: int) -> tuple[Scaling, Scaling]:
        """Return the scaling of a dtype's elements before and after the sum over ``size`` ranks."""
        if self.predivide == 1.0 or dtype.kind in "iu":  # which would lose a remainder before it
            return _UNSCALED, self.combined(size)
        return Scaling(1.0 / self.predivide), Scaling(self.predivide, size)

    def combined(self, size: int) -> Scaling:
        """Return both scalings as one, for strategies that scale once."""
        return Scaling(1.0, size) if self.op is ReduceOp.AVERAGE else _UNSCALED


class Bucket:
    """The send and the result array of several parameters of one dtype.

    An exchange reads ``send`` and writes ``result``: the gradients stay intact until the step is
    complete.

    Args:
        parameters: in their order within the arrays.
        reduction: to be computed by the exchange.
        empty: makes a flat array of a given size and dtype; None: there are no arrays before
            `derive`.
        state: what strategies remember of the parameters; None: nothing yet.

    Attributes:
        bounds: the offset of each parameter in the arrays, and the end of the last one.
        send: the gradients, flat. It may be ``result``: read it before writing there.
        result: the reduced gradients, flat.
        count: the number of exchanges before this one, the same on all ranks.
        absent: positions of parameters of which no rank has a gradient in this step.
        zero_copy: flat arrays that stand for parts of ``send`` until `copy_zero_copy_parts` copies
            them, by their offset there.
        unsent: None, or an array like ``send`` in which the exchange leaves the part of ``send``
            that is missing from the result.
        sent: the bytes that the last exchange has sent to other ranks; see `CountingTransport`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        reduction: Reduction,
        empty: Callable[[int, np.dtype[Any]], Any] | None = np.empty,
        state: StrategyState | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.reduction = reduction
        self._empty = empty
        self.bounds = np.cumsum([0, *(parameter.size for parameter in parameters)]).tolist()
        self.state = BucketState(parameters, StrategyState() if state is None else state)
        self.count = 0
        self.absent: Collection[int] = ()
        self.zero_copy: dict[int, Any] = {}
        self.unsent: Any = None
        self.sent = 0
        self.send: Any = None
        self.result: Any = None
        if empty is not None:
            self.send = empty(self.bounds[-1], parameters[0].dtype)
            self.allocate_result()

    def allocate_result(self) -> None:
        """Allocate a new result array; its users may keep the old one."""
        assert self._empty is not None
        self.result = None  # so that its memory can be reused
        self.result = self._empty(self.bounds[-1], self.parameters[0].dtype)

    def copy_zero_copy_parts(self) -> None:
        """Copy all zero-copy parts into ``send``."""
        copy_parts([*self.zero_copy.items()], self.send)
        self.zero_copy = {}

    def derive(self, send: Any, result: Any, unsent: Any = None) -> Bucket:
        """Return a bucket of the same parameters with other arrays of the same size."""
        derived = copy.copy(self)
        derived.send, derived.result, derived.unsent = send, result, unsent
        derived.zero_copy = {}
        return derived

    def reduce(self, transport: Transport, send: Any, result: Any, scaling: Scaling) -> None:
        """Write ``scaling.apply(the reduction of all ranks' send)`` into ``result``.

        Both are of the bucket's size and of one float type, and may be one array.
        """
        if self.reduction.op is ReduceOp.ADASUM:
            self.copy_zero_copy_parts()
            transport.adasum(send, result, scaling, self.bounds)
        elif self.zero_copy:
            transport.allreduce_zero_copy(
                send, sorted(self.zero_copy.items()), result, ReduceOp.SUM, scaling
            )
        else:
            transport.allreduce(send, result, ReduceOp.SUM, scaling)

    def send_slot(self, position: int) -> Any:
        """Return a parameter's part of ``send``, in the parameter's shape."""
        return self.slot(self.send, position)

    def result_slot(self, position: int) -> Any:
        """Return a parameter's part of ``result``, in the parameter's shape."""
        return self.slot(self.result, position)

    def slot(self, array: Any, position: int) -> Any:
        """Return a parameter's part of an array like ``send``, in the parameter's shape."""
        start, stop = self.bounds[position : position + 2]
        return array[start:stop].reshape(self.parameters[position].shape)

    def generator(self, seed: int, *more: int, position: int | None = None) -> np.random.Generator:
        """Return a generator that depends on the step and on all parameters, or one, alone."""
        chosen = self.parameters if position is None else (self.parameters[position],)
        names = "\n".join(parameter.name for parameter in chosen)
        entropy = [seed, self.count, zlib.crc32(names.encode()), *more]
        return np.random.Generator(np.random.SFC64(entropy))
