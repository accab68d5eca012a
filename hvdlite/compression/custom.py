"""Compression classes of the user's own, with ``compress`` and ``decompress``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np

from hvdlite.base.arrays import as_array, flat
from hvdlite.base.reduction import ReduceOp, is_floating
from hvdlite.compression.bucket import Bucket, Parameter
from hvdlite.compression.strategy import Strategy
from hvdlite.transport import Transport


class Compressor:
    """Base of compression classes of the user's own, which may also just resemble it."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to be averaged instead, and the context that `decompress` needs.

        The first has the same shape and dtype on all ranks.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor, of its original shape, that an averaged one stands for."""
        raise NotImplementedError


@singledispatch
def cast(tensor: Any, dtype: Any) -> Any:
    """Return a tensor as another float type, or unchanged if it holds no floats.

    This is for arrays; adapters register their framework's tensors.

    Args:
        dtype: the framework's, or the name ``"float16"``.
    """
    array = np.asarray(tensor)
    return array.astype(dtype) if is_floating(array.dtype) else array


@dataclass(frozen=True)
class Conversion:
    """Conversion of a framework's tensors to arrays and back; by default for arrays themselves."""

    to_tensor: Callable[[Any], Any] = np.asarray
    to_array: Callable[[Any], Any] = np.asarray


@dataclass(frozen=True, repr=False)
class Custom(Strategy):
    """Send the tensors that a compression class of the user's own returns.

    Tensors are compressed one by one, summed or averaged, and decompressed.
    """

    compressor: Any
    conversion: Conversion = Conversion()

    def choose(self, parameter: Parameter) -> Strategy:
        return self

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        scaling = bucket.reduction.combined(transport.size)
        for position, parameter in enumerate(bucket.parameters):
            given = self.conversion.to_tensor(bucket.send_slot(position).copy())
            compressed, context = self.compressor.compress(given)
            array = np.array(as_array(self.conversion.to_array(compressed)))
            reduced = flat(array)
            if reduced.size:
                transport.allreduce(reduced, reduced, ReduceOp.SUM, scaling)
            tensor = self.conversion.to_tensor(reduced.reshape(array.shape))
            result = np.asarray(
                self.conversion.to_array(self.compressor.decompress(tensor, context))
            )
            if result.shape != parameter.shape:
                raise ValueError(
                    f"{self.name}.decompress() returned the shape {list(result.shape)} for "
                    f"{parameter.name!r}; expected {list(parameter.shape)}, as it was compressed"
                )
            bucket.result_slot(position)[...] = result

    def __repr__(self) -> str:
        """Return the class's name; its behaviour cannot be compared across ranks."""
        kind = self.compressor if isinstance(self.compressor, type) else type(self.compressor)
        return f"{kind.__module__}.{kind.__qualname__}"
