"""What ``compression=`` takes."""

from __future__ import annotations

from numbers import Real
from typing import Any

from hvdlite.arguments import check_count
from hvdlite.compression.blockwise import Blockwise8
from hvdlite.compression.by_parameter import ByParameter
from hvdlite.compression.cast import Cast
from hvdlite.compression.compressors import FP16Compressor, NoneCompressor
from hvdlite.compression.custom import Conversion, Custom
from hvdlite.compression.deep_gradient import DeepGradientCompression
from hvdlite.compression.error_feedback import ErrorFeedback
from hvdlite.compression.float8 import Float8
from hvdlite.compression.majority_vote import MajorityVote
from hvdlite.compression.natural import Natural
from hvdlite.compression.power_sgd import PowerSGD
from hvdlite.compression.qsgd import QSGD
from hvdlite.compression.random_k import RandomK
from hvdlite.compression.sign import Sign
from hvdlite.compression.strategy import DENSE, Strategy
from hvdlite.compression.tern_grad import TernGrad
from hvdlite.compression.threshold import Threshold
from hvdlite.compression.top_k import TopK
from hvdlite.compression.two_bit import TwoBit
from hvdlite.compression.warm_up import WarmUp


class Compression:
    """The strategies that ``compression=`` takes, the same for every framework.

    Those in lower case are ready to be used, as Horovod's are; the others are classes with
    settings: ``hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.01))``.
    """

    none: Strategy = DENSE
    fp16: Strategy = Cast("fp16")
    bf16: Strategy = Cast("bf16")

    Cast = Cast
    TopK = TopK
    Threshold = Threshold
    RandomK = RandomK
    DeepGradientCompression = DeepGradientCompression
    Float8 = Float8
    Blockwise8 = Blockwise8
    Sign = Sign
    MajorityVote = MajorityVote
    TwoBit = TwoBit
    QSGD = QSGD
    TernGrad = TernGrad
    Natural = Natural
    PowerSGD = PowerSGD
    ErrorFeedback = ErrorFeedback
    WarmUp = WarmUp
    ByParameter = ByParameter


def check_strategy(compression: Any, conversion: Conversion | None = None) -> Strategy:
    """Return the strategy that ``compression`` is, or stands for.

    Args:
        compression: a strategy, or a compression class of the user's own, as in `Compressor`.
        conversion: of the tensors that such a class gets; None: it gets arrays.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(compression, Strategy):
        return compression
    if compression is NoneCompressor:
        return DENSE
    if compression is FP16Compressor:
        return Compression.fp16
    if isinstance(compression, type) and issubclass(compression, Strategy):
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


def check_groups(num_groups: int, groups: int | list[Any] | None) -> None:
    """Check Horovod's two ways to group gradients, which buckets have no need of.

    Raises:
        ValueError: a number is negative or no integer, or ``groups`` is neither a number nor a
            list.
    """
    check_count("num_groups", num_groups, 0)
    if isinstance(groups, Real):
        check_count("groups", groups, 0)
    if groups is not None and not isinstance(groups, (Real, list)):
        raise ValueError(f"groups={groups!r} is neither a number nor a list of lists of parameters")
