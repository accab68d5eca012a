"""What happens to gradients on their way: strategies, by name."""

from __future__ import annotations

from hvdlite.exchange.bucket import Bucket
from hvdlite.exchange.by_parameter import ByParameter
from hvdlite.exchange.cast import Cast
from hvdlite.exchange.compression import Compression, check_groups, check_strategy
from hvdlite.exchange.custom import Compressor, Conversion, Custom
from hvdlite.exchange.error_feedback import ErrorFeedback
from hvdlite.exchange.parameter import Parameter, Reduction
from hvdlite.exchange.power_sgd import PowerSGD
from hvdlite.exchange.state import StrategyState
from hvdlite.exchange.strategy import DENSE, Dense, Strategy, check_op, exchange_bucket
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
    "Dense",
    "ErrorFeedback",
    "Parameter",
    "PowerSGD",
    "Reduction",
    "Strategy",
    "StrategyState",
    "WarmUp",
    "check_groups",
    "check_op",
    "check_strategy",
    "exchange_bucket",
]
