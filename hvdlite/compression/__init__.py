"""Compression: how gradients travel between ranks, by interchangeable strategies.

``strategy.py`` has the interface; `Compression` in ``registry.py`` lists all, and says how to add
one.
"""

from __future__ import annotations

from hvdlite.compression.bucket import Bucket, Parameter, Reduction
from hvdlite.compression.cast import Cast
from hvdlite.compression.custom import Compressor, Conversion, Custom
from hvdlite.compression.low_rank import PowerSGD
from hvdlite.compression.quantized import QSGD, Blockwise8, Float8, Natural
from hvdlite.compression.registry import Compression, FP16Compressor, NoneCompressor, check_strategy
from hvdlite.compression.signs import MajorityVote, Sign, TernGrad, TwoBit
from hvdlite.compression.sparse import DeepGradientCompression, RandomK, Threshold, TopK
from hvdlite.compression.state import StrategyState
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
