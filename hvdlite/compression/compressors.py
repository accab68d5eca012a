"""Horovod's compression classes, to be derived from."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np

from hvdlite.compression.custom import Compressor
from hvdlite.reduction import is_floating


@singledispatch
def cast(tensor: Any, dtype: Any) -> Any:
    """Return a tensor as another float type; one that holds no floats as it is.

    This is for arrays; adapters register their framework's tensors.

    Args:
        tensor: of any dtype.
        dtype: the framework's, or the name ``"float16"``.
    """
    array = np.asarray(tensor)
    return array.astype(dtype) if is_floating(array.dtype) else array


class NoneCompressor(Compressor):
    """Send tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor, and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Send floats as 16-bit floats."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in 16 bits, if it holds floats, and its dtype."""
        return cast(tensor, "float16"), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype that it had."""
        return cast(tensor, ctx)
