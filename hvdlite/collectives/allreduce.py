"""Allreduce: every rank gets the reduction of all ranks' arrays.

The transport adds up the arrays: on one node `SharedMemoryTransport.allreduce_init` in
``transport/shared_memory/transport.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hvdlite.base import reduction
from hvdlite.base.arrays import set_first
from hvdlite.base.reduction import (
    ReduceOp,
    Scaling,
    first_beyond,
    is_floating,
    scale_integers,
    scales_integers,
)
from hvdlite.collectives.arrays import ArrayOperation, checked_array, empty_like
from hvdlite.compression import (
    Bucket,
    Compression,
    Parameter,
    Reduction,
    Strategy,
    check_strategy,
    exchange_bucket,
)
from hvdlite.engine import Handle, Operation, Signature, runtime
from hvdlite.engine.device import DeviceArray
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import GradientError
from hvdlite.observe import timeline
from hvdlite.transport import Transport
from hvdlite.transport.transport import LARGEST_FUSED, LEAST_ANNOUNCED


def allreduce(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    out: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks and return the result, equal to the bit on all of them.

    The result is ``postscale * op(prescale * array)``; 16-bit floats are accumulated in
    float32. Sums and products of integers wrap, as numpy's do. Their average is exact and rounded
    towards zero. With factors, integers are computed in float64, and the result is rounded towards
    zero.

    Args:
        array: Array of any shape (the same on all ranks) and dtype: bool, integers, floats of 16
            to 64 bits, ``ml_dtypes.bfloat16``; complex for Sum and Average.
        average: Deprecated; True is Average, False is Sum.
        name: Name that pairs this call with those of the other ranks; None pairs by order.
        op: One of the six reductions; None is Average.
        prescale_factor: Factor for the array before the reduction.
        postscale_factor: Factor for the result.
        compression: Strategy for floats; all but ``Compression.none`` need Sum or Average. It must
            be stateless, or a class with ``compress(array)`` and ``decompress(array, ctx)``.
        out: Contiguous array for the result, which may be ``array``; None allocates one.
        process_set: The ranks that take part.

    Returns:
        An array of the input's shape and dtype.

    Raises:
        ValueError: ``op`` and ``average`` contradict, the reduction has no meaning for the
            dtype or the compression, a factor is not finite or beyond the integers' range,
            ``out`` does not fit, this rank is not in the process set, or an allreduce of this
            name is still in flight.
        GradientError: On all ranks; factors take an integer out of its type's range.
        HorovodInternalError: The ranks disagree, or communication failed.
    """
    return runtime.engine(process_set).run(
        "allreduce",
        name,
        lambda name: describe_allreduce(
            array, name, op, prescale_factor, postscale_factor, compression, out, average
        ),
    )


def allreduce_async(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: Strategy = Compression.none,
    out: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce` and return a handle; do not touch the array until it is done."""
    return runtime.engine(process_set).submit(
        "allreduce",
        name,
        lambda name: describe_allreduce(
            array, name, op, prescale_factor, postscale_factor, compression, out, average
        ),
    )


def describe_allreduce(
    array: Any,
    name: str,
    op: ReduceOp | int | None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Strategy = Compression.none,
    out: Any = None,
    average: bool | None = None,
) -> Allreduce:
    """Check the arguments of `allreduce`, as far as one rank can, and return its operation."""
    op = reduction.choose(average, op)
    array = checked_array(array, out)
    reduction.check(op, array.dtype)
    if prescale != 1.0 or type(prescale) is not float:
        prescale = reduction.check_factor("prescale_factor", prescale, array.dtype)
    if postscale != 1.0 or type(postscale) is not float:
        postscale = reduction.check_factor("postscale_factor", postscale, array.dtype)
    strategy = None
    if compression is not Compression.none:
        strategy = _strategy(compression, array, name, op, prescale, postscale)
    return Allreduce(name, array, op, prescale, postscale, out, strategy)


def _strategy(
    compression: Strategy, array: Any, name: str, op: ReduceOp, prescale: float, postscale: float
) -> Strategy | None:
    """Return the strategy for an array; None where its elements travel as they are."""
    compression = check_strategy(compression)
    if compression.is_identity:
        return None
    if compression.stateful:
        raise ValueError(
            f"compression={compression!r} keeps state from step to step, which an "
            "allreduce by itself cannot; use it in a DistributedOptimizer or a "
            "DistributedGradientTape"
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(
            f"compression needs op=hvd.Sum or hvd.Average, not {op.name.capitalize()}; "
            "leave compression out for the others"
        )
    if compression.choose(Parameter(name, array.shape, array.dtype)).is_identity:
        return None
    if scales_integers(array.dtype, prescale, postscale):
        raise ValueError(
            f"prescale_factor={prescale:g} and postscale_factor={postscale:g} cannot be applied to "
            f"{array.dtype.name} with compression={compression!r}; scale in compress() and "
            "decompress()"
        )
    return compression


@lru_cache(4096)
def _signature(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    on_device: bool,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    compression: str,
    root: int | None = None,
) -> Signature:
    return Signature(
        (
            ("the operation", "allreduce" if root is None else f"reduce to rank {root}"),
            ("dtype", dtype.name),
            ("shape", shape),
            ("op", op.name.capitalize()),
            ("prescale_factor", prescale),
            ("postscale_factor", postscale),
            ("compression", compression),
            ("device", "cuda" if on_device else "cpu"),
        )
    )


@lru_cache
def _split_average(op: ReduceOp, postscale: float, size: int) -> tuple[ReduceOp, Scaling]:
    """Return the reduction that transports compute, and the scaling of its result."""
    if op is ReduceOp.AVERAGE:
        return ReduceOp.SUM, Scaling(postscale, size)
    return op, Scaling(postscale)


class Allreduce(ArrayOperation):
    """An allreduce.

    Args:
        out: Contiguous array of the same shape and dtype for the result, which may be the array
            itself; None allocates one.
        strategy: How the array travels; None: as it is.
        to: Id of the only rank whose user gets the result; None: all do.
    """

    stands_in = True
    _kept: Any = None
    _scales_integers = _can_be_fused = False
    #: The transport that `_reduce` reduces over.
    _prepared_for: Transport | None = None
    _reduce: Callable[[], None]

    def __init__(
        self,
        name: str,
        array: Any,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        strategy: Strategy | None = None,
        to: int | None = None,
    ) -> None:
        self._given = out
        # Allocated before the ranks meet: a failure then concerns this rank alone.
        self._out = empty_like(array) if out is None else out
        compression = "none" if strategy is None else strategy.name
        on_device = isinstance(array, DeviceArray)
        signature = _signature(
            array.dtype, array.shape, on_device, op, prescale, postscale, compression, to
        )
        super().__init__(name, signature, array, out=self._out)
        self._op = op
        self._factors = prescale, postscale
        self._strategy = strategy
        # Flat; that of an array which is not contiguous is a copy.
        self._send = array.ravel()
        self._result = self._send if out is array else self._out.ravel()
        if on_device:
            self.stands_in = False
            self._value = self._out.tensor
        else:
            self._value = self._out
            if prescale != 1.0 or postscale != 1.0:
                self._scales_integers = scales_integers(array.dtype, prescale, postscale)
            is_plain = strategy is None and op is not ReduceOp.ADASUM
            self._can_be_fused = is_plain and not self._scales_integers
            if self._can_be_fused and prescale == 1.0:
                self.inline_data = self._send
                if self.nbytes >= LEAST_ANNOUNCED:
                    self.places = self._send, self._result

    def stand_in(self) -> Callable[[], Operation]:
        array, factors = self._array, self._factors
        return partial(
            _allreduce_zeros, self.name, array.shape, array.dtype, self._op, factors, self._strategy
        )

    @property
    def fusion(self) -> Hashable | None:
        if self.nbytes > LARGEST_FUSED or not self._can_be_fused:
            return None
        return self._send.dtype, self._op, self._factors

    def protect(self) -> None:
        if self._result is self._send and self.memory is None:
            self._kept = self._send.copy()

    def restore(self) -> None:
        if self._kept is not None:
            self._send[...] = self._kept

    def contribution(self, name: str) -> str:
        is_meant = name == self.name and self.memory is None and self._send.size
        return name if is_meant and is_floating(self._send.dtype) else ""

    def corrupt(self, name: str, value: float) -> None:
        """Set the first entry of what is sent; an array that does not get the result stays."""
        if self._result is not self._send:
            self._send = self._send.copy()
            if self.inline_data is not None:
                self.inline_data, self.places = self._send, None
        set_first(self._send, value)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> Any:
        if self._prepared_for is not transport:
            if self._strategy is not None:
                return self._exchange(transport, self._strategy)
            if self._op is ReduceOp.ADASUM:
                return self._adasum(transport)
            if self._scales_integers:
                self._result[...] = reduce_scaled_integers(
                    self, transport, self._send, self._op, self._factors
                )
                return self._value
            if self._factors[0] != 1.0:
                return self.execute_together((), transport)[0]
            op, scaling = _split_average(self._op, self._factors[1], transport.size)
            self._reduce = transport.allreduce_init(self._send, self._result, op, scaling)
            self._prepared_for = transport
        if timeline.current is None:
            self._reduce()
        else:
            with timeline.span(self.lane, timeline.EXCHANGE):
                self._reduce()
        return self._value

    def execute_together(self, others: Sequence[Any], transport: Transport) -> list[Any]:
        """Reduce the arrays of a group, of which this is the first, in one exchange."""
        group: list[Allreduce] = [self, *others]
        sends = [operation._scaled(transport) for operation in group]
        results = [operation._result for operation in group]
        op, scaling = _split_average(self._op, self._factors[1], transport.size)
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.allreduce_all(sends, results, op, scaling)
        return [operation._value for operation in group]

    def _scaled(self, transport: Transport) -> Any:
        """Return the array to reduce, multiplied by the factor that comes before."""
        if self._factors[0] == 1.0:
            return self._send
        transport.scale(self._send, self._result, Scaling(self._factors[0]))
        return self._result  # free until the reduction

    def _adasum(self, transport: Transport) -> Any:
        send, scaling = self._scaled(transport), Scaling(self._factors[1])
        with timeline.span(self.lane, timeline.EXCHANGE):
            transport.adasum(send, self._result, scaling, [0, self._send.size])
        return self._value

    def _exchange(self, transport: Transport, strategy: Strategy) -> Any:
        send, result = self._send, self._result
        prescale = Scaling(self._factors[0])
        if result is send and self.memory is None and not prescale.is_identity:
            # The strategy may refuse the array, which then stays as it is.
            send = prescale.apply(send.copy())
        else:
            send = self._scaled(transport)
        parameter = Parameter(self.name, self._array.shape, self._array.dtype)
        bucket = Bucket([parameter], Reduction(self._op), None).derive(send, result)
        with timeline.span(self.lane, timeline.EXCHANGE):
            exchange_bucket(strategy.choose(parameter), bucket, transport)
        self.sent = bucket.sent
        if self._factors[1] != 1.0:
            transport.scale(result, result, Scaling(self._factors[1]))
        return self._value


def _allreduce_zeros(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    op: ReduceOp,
    factors: tuple[float, float],
    strategy: Strategy | None,
) -> Allreduce:
    zeros = np.zeros(shape, dtype)
    return Allreduce(name, zeros, op, *factors, zeros, strategy)


def reduce_scaled_integers(
    operation: Operation,
    transport: Transport,
    send: Any,
    op: ReduceOp,
    factors: tuple[float, float],
) -> Any:
    """Reduce flat integers in float64: all ranks see, and refuse, a result beyond their type."""
    wide = scale_integers(send, factors[0])
    op, scaling = _split_average(op, factors[1], transport.size)
    with timeline.span(operation.lane, timeline.EXCHANGE):
        transport.allreduce(wide, wide, op, Scaling())
    scaled = scale_integers(wide, scaling.factor, scaling.divisor)
    beyond = first_beyond(scaled, send.dtype)
    if beyond >= 0:
        raise GradientError(
            f"{operation.name!r} with prescale_factor={factors[0]:g} and "
            f"postscale_factor={factors[1]:g}: a result is {scaled[beyond]:g}, beyond the range of "
            f"{send.dtype.name}; use smaller factors, or convert the values to a float"
        )
    return scaled
