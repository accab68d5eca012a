"""What happens to gradients on their way: strategies, by name."""

from __future__ import annotations

from hvdlite.compression.blockwise import Blockwise8
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.by_parameter import ByParameter
from hvdlite.compression.cast import Cast
from hvdlite.compression.compression import Compression, check_groups, check_strategy
from hvdlite.compression.compressors import FP16Compressor, NoneCompressor
from hvdlite.compression.custom import Compressor, Conversion, Custom
from hvdlite.compression.deep_gradient import DeepGradientCompression
from hvdlite.compression.error_feedback import ErrorFeedback
from hvdlite.compression.float8 import Float8
from hvdlite.compression.majority_vote import MajorityVote
from hvdlite.compression.natural import Natural
from hvdlite.compression.parameter import Parameter, Reduction
from hvdlite.compression.power_sgd import PowerSGD
from hvdlite.compression.qsgd import QSGD
from hvdlite.compression.random_k import RandomK
from hvdlite.compression.sign import Sign
from hvdlite.compression.state import StrategyState
from hvdlite.compression.strategy import DENSE, Dense, Strategy, check_op, exchange_bucket
from hvdlite.compression.tern_grad import TernGrad
from hvdlite.compression.threshold import Threshold
from hvdlite.compression.top_k import TopK
from hvdlite.compression.two_bit import TwoBit
from hvdlite.compression.warm_up import WarmUp

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
