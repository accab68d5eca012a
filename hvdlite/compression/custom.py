"""Compression classes of the user's own, as Horovod takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.arrays import as_array, flat
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.parameter import Parameter
from hvdlite.compression.strategy import Strategy
from hvdlite.reduction import ReduceOp
from hvdlite.transport import Transport


class Compressor:
    """What a compression class of the user's own offers; to be derived from, or just resembled."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is to be averaged in the place of a tensor, and what `decompress` needs.

        The first is a tensor whose shape and dtype are alike on all ranks.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor, of its first shape, that an average stands for."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conversion:
    """How a framework's tensors become arrays and back; the default is for arrays themselves."""

    to_tensor: Callable[[Any], Any] = np.asarray
    to_array: Callable[[Any], Any] = np.asarray


@dataclass(frozen=True, repr=False)
class Custom(Strategy):
    """Every tensor as a compression class of the user's own makes it.

    Tensors are compressed one by one; their outcomes are summed or averaged, and decompressed.

    Args:
        compressor: with ``compress(tensor)`` and ``decompress(tensor, ctx)``.
        conversion: of tensors to arrays and back.
    """

    compressor: Any
    conversion: Conversion = Conversion()

    @property
    def name(self) -> str:
        """The class's name: what it does cannot be compared."""
        kind = self.compressor if isinstance(self.compressor, type) else type(self.compressor)
        return f"{kind.__module__}.{kind.__qualname__}"

    def choose(self, parameter: Parameter) -> Strategy:
        """This one, whatever the dtype."""
        return self

    def exchange(self, bucket: Bucket, transport: Transport) -> None:
        """Compress, reduce, decompress, one tensor after the other."""
        scaling = bucket.reduction.whole(transport.size)
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
        return self.name
