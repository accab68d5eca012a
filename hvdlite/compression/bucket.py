"""A bucket: the gradients of several parameters as one flat array."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hvdlite.compression.parameter import Parameter, Reduction
from hvdlite.compression.state import BucketState, StrategyState
from hvdlite.reduction import ReduceOp, Scaling
from hvdlite.transport import Transport, adasum
from hvdlite.transport.base import place


class Bucket:
    """The send and the result array of some parameters of one dtype.

    An exchange reads ``send`` and writes ``result``: the gradients stay as they were until
    the step is done.

    Args:
        parameters: in their order within the arrays.
        reduction: what the exchange computes.
        empty: makes a flat array of so many elements of a dtype.
        state: what strategies remember of the parameters; None: nothing yet.

    Attributes:
        parameters: as given.
        reduction: as given.
        bounds: where each parameter begins in the arrays, and where the last one ends.
        send: the gradients, flat. It may be ``result``: whoever writes that has read this before.
        result: where the exchange writes, likewise.
        state: as given, of these parameters.
        count: how many exchanges have gone before, alike on all ranks.
        absent: positions of parameters of which no rank has a gradient in this step.
        lent: parts of ``send`` that lie elsewhere until `complete`, by where each begins there:
            flat arrays.
        unsent: None, or an array like ``send`` in which the exchange is to leave what of ``send``
            has no part in the result.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        reduction: Reduction,
        empty: Callable[[int, np.dtype[Any]], Any] = np.empty,
        state: StrategyState | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.reduction = reduction
        self._empty = empty
        self.bounds = np.cumsum([0, *(parameter.size for parameter in parameters)]).tolist()
        self.state: BucketState = (StrategyState() if state is None else state).of(parameters)
        self.count = 0
        self.absent: Collection[int] = ()
        self.lent: dict[int, Any] = {}
        self.unsent: Any = None
        self.renew_send()
        self.renew()

    def renew_send(self) -> None:
        """Get another array for the gradients: the one before is its users'."""
        self.send: Any = self._empty(self.bounds[-1], self.parameters[0].dtype)

    def renew(self) -> None:
        """Get another array for the result: the one before is its users' as long as they like."""
        self.result: Any = None  # its memory may be what comes back
        self.result = self._empty(self.bounds[-1], self.parameters[0].dtype)

    def complete(self) -> None:
        """Copy what is lent to where it belongs."""
        place([*self.lent.items()], self.send)
        self.lent = {}

    def derive(self, send: Any, result: Any, unsent: Any = None) -> Bucket:
        """Make a bucket of the same parameters with other arrays, alike in size."""
        derived = copy.copy(self)
        derived.send, derived.result, derived.unsent = send, result, unsent
        derived.lent = {}
        return derived

    def reduce(self, transport: Transport, send: Any, result: Any, scaling: Scaling) -> None:
        """Write ``scaling.apply(the reduction of all ranks' send)`` into ``result``.

        Args:
            transport: of the ranks.
            send: flat, of as many elements as the bucket, of any float type.
            result: likewise, of the same type; it may be ``send``.
            scaling: applied after the reduction.
        """
        if self.reduction.op is ReduceOp.ADASUM:
            self.complete()
            adasum.adasum(transport, send, result, scaling, self.bounds)
        elif self.lent:
            transport.allreduce_lent(send, sorted(self.lent.items()), result, ReduceOp.SUM, scaling)
        else:
            transport.allreduce(send, result, ReduceOp.SUM, scaling)

    def send_slot(self, position: int) -> Any:
        """The part of ``send`` that belongs to a parameter, in the parameter's shape."""
        return self.slot(self.send, position)

    def result_slot(self, position: int) -> Any:
        """The part of ``result`` that belongs to a parameter, in the parameter's shape."""
        return self.slot(self.result, position)

    def slot(self, array: Any, position: int) -> Any:
        """The part of an array like ``send`` that belongs to a parameter, in its shape."""
        start, stop = self.bounds[position : position + 2]
        return array[start:stop].reshape(self.parameters[position].shape)
