"""Compression: how gradients travel between ranks, by interchangeable strategies.

``strategy.py`` has the interface; `Compression` lists all, and says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite.compression.bucket import Bucket, Parameter, Reduction, StrategyState
from hvdlite.compression.cast import Cast
from hvdlite.compression.custom import Compressor, Conversion, Custom
from hvdlite.compression.low_rank import PowerSGD
from hvdlite.compression.quantized import QSGD, Blockwise8, Float8, Natural
from hvdlite.compression.signs import MajorityVote, Sign, TernGrad, TwoBit
from hvdlite.compression.sparse import DeepGradientCompression, RandomK, Threshold, TopK
from hvdlite.compression.strategy import DENSE, Dense, Strategy, check_op, exchange_bucket
from hvdlite.compression.wrappers import ByParameter, ErrorFeedback, WarmUp

__all__ = [
    "DENSE",
    "Blockwise8",
    "Bucket",
    "ByParameter",
    "Cast",
    "Compression",
    "Compressor",
    "Conversion",
    "Custom",
    "DeepGradientCompression",
    "Dense",
    "ErrorFeedback",
    "FP16Compressor",
    "Float8",
    "MajorityVote",
    "Natural",
    "NoneCompressor",
    "Parameter",
    "PowerSGD",
    "QSGD",
    "RandomK",
    "Reduction",
    "Sign",
    "Strategy",
    "StrategyState",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoBit",
    "WarmUp",
    "check_op",
    "check_strategy",
    "exchange_bucket",
]


class Compression:
    """The strategies that ``compression=`` takes, the same for every framework.

    Names in lower case are strategies, as in Horovod; the others are classes with settings:
    ``hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.01))``.

    To add a strategy, derive a class with an ``exchange`` from `Strategy` in a file of its own, and
    name it in this class. The tests of all strategies then run on it, and ``python -m
    tests.api_table`` adds it to the documentation.
    """

    none = DENSE
    fp16 = Cast("fp16")
    bf16 = Cast("bf16")

    Cast = Cast
    Float8 = Float8
    Blockwise8 = Blockwise8
    Natural = Natural
    QSGD = QSGD
    TernGrad = TernGrad
    TwoBit = TwoBit
    Sign = Sign
    MajorityVote = MajorityVote
    TopK = TopK
    Threshold = Threshold
    RandomK = RandomK
    DeepGradientCompression = DeepGradientCompression
    PowerSGD = PowerSGD
    ErrorFeedback = ErrorFeedback
    WarmUp = WarmUp
    ByParameter = ByParameter


class NoneCompressor(Compressor):
    """Send tensors unchanged; Horovod's name for `Compression.none`, to derive from."""

    compress = staticmethod(Compression.none.compress)
    decompress = staticmethod(Compression.none.decompress)


class FP16Compressor(Compressor):
    """Send floats as 16-bit floats; Horovod's name for `Compression.fp16`, to derive from."""

    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)


# The classes themselves stand for the strategies; a class that derives from them is custom.
_HOROVODS: Mapping[Any, Strategy] = {
    NoneCompressor: Compression.none,
    FP16Compressor: Compression.fp16,
}


def check_strategy(compression: Any, conversion: Conversion | None = None) -> Strategy:
    """Return the strategy for an argument ``compression=``.

    Args:
        compression: a strategy, or a compression class of the user's own, as in `Compressor`.
        conversion: of the tensors that such a class gets; None: it gets arrays.
    """
    if isinstance(compression, Strategy):
        return compression
    if isinstance(compression, type):
        if compression in _HOROVODS:
            return _HOROVODS[compression]
        if issubclass(compression, Strategy):
            raise TypeError(
                f"compression={compression.__name__} is a class, and has settings; call it, as in "
                "hvd.Compression.TopK(0.01)"
            )
    if callable(getattr(compression, "compress", None)) and callable(
        getattr(compression, "decompress", None)
    ):
        return Custom(compression, conversion or Conversion())
    raise TypeError(
        f"compression={compression!r} is no compression; use hvd.Compression.none, .fp16 or .bf16, "
        "another one of hvd.Compression, or a class with compress(tensor) and "
        "decompress(tensor, ctx)"
    )
