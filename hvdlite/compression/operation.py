"""The exchange of a bucket as an operation of a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.compression.bucket import Bucket
from hvdlite.compression.parameter import Parameter, Reduction
from hvdlite.compression.strategy import Strategy, exchange_bucket
from hvdlite.engine.operation import Operation
from hvdlite.engine.operations import allreduce_signature, used
from hvdlite.engine.overlap import Extent
from hvdlite.reduction import Scaling
from hvdlite.transport import Transport


class CompressedAllreduce(Operation):
    """An allreduce of one array by a strategy.

    Args:
        name: the operation's name.
        array: any shape; it must not change until the operation has ended.
        strategy: how it travels.
        reduction: sum or average.
        prescale: factor before the reduction.
        postscale: factor after it.
        out: where the result goes; None: a new array.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        strategy: Strategy,
        reduction: Reduction,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
    ) -> None:
        super().__init__(
            name,
            allreduce_signature(
                array.dtype, array.shape, reduction.op, prescale, postscale, strategy.name
            ),
        )
        self._array = array
        parameter = Parameter(name, array.shape, array.dtype)
        self._strategy = strategy.choose(parameter)
        self._bucket = Bucket([parameter], reduction)
        self._prescale = Scaling(prescale)
        self._postscale = Scaling(postscale)
        self._out = out

    stands_in = True

    def stand_in(self) -> Callable[[], Operation]:
        """What makes one of zeros."""
        parameter, reduction = self._bucket.parameters[0], self._bucket.reduction
        return partial(_of_zeros, parameter, self._strategy, reduction)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        """Return the reduced array, of the input's shape and dtype."""
        bucket = self._bucket
        bucket.send_slot(0)[...] = self._array
        bucket.send[...] = self._prescale.apply(bucket.send)
        exchange_bucket(self._strategy, bucket, transport)
        result = self._postscale.apply(bucket.result).reshape(self._array.shape)
        if self._out is None:
            return result
        self._out[...] = result
        return self._out

    def extents(self) -> Sequence[Extent]:
        """The array's memory, and that of the result where the caller has given it."""
        return used(self, self._array, self._out)


def _of_zeros(parameter: Parameter, strategy: Strategy, reduction: Reduction) -> Operation:
    zeros = np.zeros(parameter.shape, parameter.dtype)
    return CompressedAllreduce(parameter.name, zeros, strategy, reduction)
