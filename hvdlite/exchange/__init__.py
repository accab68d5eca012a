"""What happens to gradients on their way: strategies, by name."""

from __future__ import annotations

from hvdlite.exchange.blockwise import Blockwise8
from hvdlite.exchange.bucket import Bucket
from hvdlite.exchange.by_parameter import ByParameter
from hvdlite.exchange.cast import Cast
from hvdlite.exchange.compression import Compression, check_groups, check_strategy
from hvdlite.exchange.compressors import FP16Compressor, NoneCompressor
from hvdlite.exchange.custom import Compressor, Conversion, Custom
from hvdlite.exchange.deep_gradient import DeepGradientCompression
from hvdlite.exchange.error_feedback import ErrorFeedback
from hvdlite.exchange.float8 import Float8
from hvdlite.exchange.majority_vote import MajorityVote
from hvdlite.exchange.natural import Natural
from hvdlite.exchange.parameter import Parameter, Reduction
from hvdlite.exchange.power_sgd import PowerSGD
from hvdlite.exchange.qsgd import QSGD
from hvdlite.exchange.random_k import RandomK
from hvdlite.exchange.sign import Sign
from hvdlite.exchange.state import StrategyState
from hvdlite.exchange.strategy import DENSE, Dense, Strategy, check_op, exchange_bucket
from hvdlite.exchange.tern_grad import TernGrad
from hvdlite.exchange.threshold import Threshold
from hvdlite.exchange.top_k import TopK
from hvdlite.exchange.two_bit import TwoBit
from hvdlite.exchange.warm_up import WarmUp

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
    "RandomK",
    "QSGD",
    "PowerSGD",
    "Reduction",
    "Sign",
    "Strategy",
    "StrategyState",
    "Threshold",
    "TopK",
    "TernGrad",
    "TwoBit",
    "WarmUp",
    "check_groups",
    "check_op",
    "check_strategy",
    "exchange_bucket",
]
