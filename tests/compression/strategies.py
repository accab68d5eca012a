"""What is checked of each strategy: a new one has to be added here."""

from __future__ import annotations

from hvdlite.compression import Compression, ErrorFeedback, WarmUp

#: Every strategy, most of them as they are meant to be used.
STRATEGIES = [
    Compression.none,
    Compression.fp16,
    Compression.bf16,
    Compression.Cast("fp16", scale="auto"),
    Compression.MajorityVote(),
    Compression.QSGD(),
    Compression.TernGrad(),
    Compression.Natural(),
    Compression.DeepGradientCompression(0.1, clip_norm=1.0),
    WarmUp(ErrorFeedback(Compression.TopK(0.2)), 1),
    *(
        ErrorFeedback(inner)
        for inner in (
            Compression.fp16,
            Compression.Float8(),
            Compression.Blockwise8(),
            Compression.Sign(),
            Compression.TwoBit(0.5),
            Compression.TopK(0.1),
            Compression.TopK(0.1, per="tensor"),
            Compression.Threshold(1.0),
            Compression.RandomK(0.1),
            Compression.PowerSGD(2),
        )
    ),
]
