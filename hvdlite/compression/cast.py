"""Rounding to 16-bit floats."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from hvdlite.base import float16
from hvdlite.base.arguments import check_choice
from hvdlite.base.arrays import as_bytes
from hvdlite.base.reduction import ReduceOp, Scaling, is_floating
from hvdlite.compression.bucket import Bucket, Parameter
from hvdlite.compression.codec import Codec, add_by_slices, greatest_magnitude
from hvdlite.compression.custom import cast
from hvdlite.compression.strategy import DENSE, Strategy
from hvdlite.transport import Transport

_log = logging.getLogger("hvdlite")
# Larger scales, and their reciprocals, are out of the range of float32.
_MOST_BITS = 100
_DTYPES: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, repr=False)
class Cast(Strategy):
    """Send gradients rounded to 16-bit floats, which halves the bytes of float32.

    An average is divided before rounding, so that the sum stays in range, and the sum is
    accumulated in float32. Types that are not wider floats are exchanged unchanged.

    Args:
        kind: ``"fp16"`` or ``"bf16"``.
        scale: the factor by which values are multiplied before rounding, and divided after the
            sum. A number: values that are out of range then are clipped, with a warning.
            ``"auto"``: a power of two that brings the bucket's greatest magnitude on any rank just
            below the largest number of the type; nothing overflows, and as little as possible
            underflows, at the cost of one more small exchange. None: values are not scaled, and
            overflow to infinities.

    Raises:
        ValueError: an argument is none of these.
    """

    kind: str
    scale: float | Literal["auto"] | None = None

    on_device = True
    ops = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)
    tells_unsent = True
    takes_weights = True
    is_elementwise = True

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, *_DTYPES)
        if self.scale not in (None, "auto") and not (
            isinstance(self.scale, (int, float))
            and 2.0**-_MOST_BITS <= self.scale <= 2.0**_MOST_BITS
        ):
            raise ValueError(
                f"scale={self.scale!r} is neither a number from 2**-{_MOST_BITS} to 2**{_MOST_BITS}"
                " nor 'auto' or None"
            )
        if self.scale is not None:
            object.__setattr__(self, "is_elementwise", self.scale != "auto")
            object.__setattr__(self, "on_device", False)
            object.__setattr__(self, "ops", (ReduceOp.AVERAGE, ReduceOp.SUM))

    def __repr__(self) -> str:
        scaled = "" if self.scale is None else f", scale={self.scale!r}"
        return f"Compression.Cast({self.kind!r}{scaled})" if scaled else f"Compression.{self.kind}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the 16-bit type."""
        return _DTYPES[self.kind]

    def choose(self, parameter: Parameter) -> Strategy:
        return self if self._narrows(parameter.dtype) else DENSE

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return self.dtype if self._narrows(dtype) else dtype

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return any framework's tensor in 16 bits, if it holds floats, and its dtype.

        This is for compression by hand, as with Horovod's classes; it ignores ``scale``.
        """
        return cast(tensor, self.dtype.name), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return a tensor in the dtype that `compress` returned with it."""
        return cast(tensor, ctx)

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        factor = self._factor(bucket, transport)
        if bucket.unsent is not None:
            # Only the rank that adds up knows the rounding error of the sum.
            codec = _Rounding(self, Scaling(factor), bucket, transport)
            add_by_slices(codec, bucket, transport)
            return
        scaling = replace(bucket.reduction.combined(transport.size), factor=factor)
        rounded = transport.empty(bucket.send.size, self.dtype)
        if self.scale is None:
            transport.convert(bucket.send, rounded, scaling)
        else:
            _Rounding(self, scaling, bucket, transport).encode(bucket.send, as_bytes(rounded))
        bucket.reduce(transport, rounded, rounded, Scaling())
        transport.convert(rounded, bucket.result, Scaling(1.0 / factor))

    def _narrows(self, dtype: np.dtype[Any]) -> bool:
        return is_floating(dtype) and dtype.itemsize > self.dtype.itemsize

    def _factor(self, bucket: Bucket, transport: Transport) -> float:
        if self.scale != "auto":
            return 1.0 if self.scale is None else float(self.scale)
        greatest = np.array([greatest_magnitude(bucket.send)], np.float64)
        transport.allreduce(greatest, greatest, ReduceOp.MAX, Scaling())
        # The sum of all ranks' values must be in range, too.
        terms = 1 if bucket.reduction.op is ReduceOp.AVERAGE else transport.size
        room = _largest(self.dtype) / (greatest[0] * terms or np.nan)
        if not np.isfinite(room):  # zeros only, or a NaN or an infinity
            return 1.0
        return float(2.0 ** np.clip(np.floor(np.log2(room or 1.0)), -_MOST_BITS, _MOST_BITS))


class _Rounding(Codec):
    """Encoding of scaled values as 16-bit floats, clipped if the strategy's scale is a number."""

    piece = float16.PIECE  # there are no temporary arrays

    def __init__(
        self, strategy: Cast, scaling: Scaling, bucket: Bucket, transport: Transport
    ) -> None:
        self._dtype = strategy.dtype
        self._scaling = scaling
        self._clips = isinstance(strategy.scale, (int, float))
        self._bucket = bucket
        self._convert = transport.convert
        self._clipped = 0

    def body(self, count: int, dtype: np.dtype[Any]) -> int:
        return 2 * count

    def encode(self, values: Any, out: Any, generator: Any = None) -> None:
        """Scale and round; warn if values were clipped."""
        super().encode(values, out)
        if self._clipped:
            names = ", ".join(repr(parameter.name) for parameter in self._bucket.parameters)
            _log.warning(
                "%d of %d values were too large for %s times %g and have been clipped, in the "
                "gradients of %s; lower the scale, or use scale='auto'",
                self._clipped,
                values.size,
                self._dtype.name,
                self._scaling.factor,
                names,
            )
            self._clipped = 0

    def write(self, values: Any, head: Any, out: Any, generator: Any) -> None:
        scaling = self._scaling
        if self._clips:
            is_single = values.dtype == np.float32
            scaled = float16.scratch(values.size) if is_single else np.empty_like(values)
            scaling.write(values, scaled)
            largest = scaled.dtype.type(_largest(self._dtype))
            if beyond := int(np.count_nonzero(np.abs(scaled) > largest)):
                self._clipped += beyond
                np.clip(scaled, -largest, largest, out=scaled)
            values, scaling = scaled, Scaling()
        self._convert(values, out.view(self._dtype), scaling)

    def read(self, body: Any, head: Any, out: Any) -> None:
        self._convert(body.view(self._dtype), out, Scaling(1.0 / self._scaling.factor))


def _largest(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
