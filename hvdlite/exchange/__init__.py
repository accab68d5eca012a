"""What happens to gradients on their way: strategies, by name."""

from __future__ import annotations

from hvdlite.exchange.bucket import Bucket
from hvdlite.exchange.by_parameter import ByParameter
from hvdlite.exchange.cast import Cast
from hvdlite.exchange.compression import Compression, check_groups, check_strategy
from hvdlite.exchange.custom import Compressor, Conversion, Custom
from hvdlite.exchange.deep_gradient import DeepGradientCompression
from hvdlite.exchange.error_feedback import ErrorFeedback
from hvdlite.exchange.parameter import Parameter, Reduction
from hvdlite.exchange.random_k import RandomK
from hvdlite.exchange.state import StrategyState
from hvdlite.exchange.strategy import DENSE, Dense, Strategy, check_op, exchange_bucket
from hvdlite.exchange.threshold import Threshold
from hvdlite.exchange.top_k import TopK
from hvdlite.exchange.warm_up import WarmUp

__all__ = [
    "DENSE",
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
    "Parameter",
    "RandomK",
    "Reduction",
    "Strategy",
    "StrategyState",
    "Threshold",
    "TopK",
    "WarmUp",
    "check_groups",
    "check_op",
    "check_strategy",
    "exchange_bucket",
]
