"""The strategies that are held to the laws: every registered one, without being listed here."""

from __future__ import annotations

from hvdlite.compression import Compression, Parameter, Strategy

C = Compression


def _fp16_but_scalars(parameter: Parameter) -> Strategy:
    return C.fp16 if parameter.shape else C.none


#: Settings that are tried instead of the default ones.
SETTINGS: dict[type[Strategy], list[Strategy]] = {
    C.Cast: [C.fp16, C.bf16, C.Cast("fp16", scale="auto"), C.Cast("bf16", scale=8.0)],
    C.Float8: [C.Float8(), C.Float8(16)],
    C.Blockwise8: [C.Blockwise8(), C.Blockwise8(16)],
    C.QSGD: [C.QSGD(), C.QSGD(1, 5), C.QSGD(127)],
    C.TernGrad: [C.TernGrad(), C.TernGrad(None, "bucket")],
    C.TwoBit: [C.TwoBit(0.3)],
    C.Sign: [C.Sign(), C.Sign("bucket")],
    C.TopK: [C.TopK(0.05), C.TopK(count=3, per="tensor")],
    C.Threshold: [C.Threshold(1.0)],
    C.RandomK: [C.RandomK(0.1), C.RandomK(0.1, unbiased=True)],
    C.DeepGradientCompression: [C.DeepGradientCompression(0.1, clip_norm=1.0)],
    C.PowerSGD: [C.PowerSGD(1), C.PowerSGD(2, min_compression=0.5, warm_start=False)],
    C.ErrorFeedback: [],  # below, around every other one
    C.WarmUp: [C.WarmUp(C.fp16, 2), C.WarmUp(C.ErrorFeedback(C.TopK(0.2)), 1)],
    C.ByParameter: [C.ByParameter(_fp16_but_scalars, [C.none, C.fp16])],
}


def _settings(kind: type[Strategy]) -> list[Strategy]:
    return SETTINGS[kind] if kind in SETTINGS else [kind()]


#: Every registered class, by its name in `Compression`.
REGISTERED = {name: each for name, each in vars(C).items() if isinstance(each, type)}

#: Every registered strategy.
PLAIN = [C.none, *(each for kind in REGISTERED.values() for each in _settings(kind))]

#: Those that `ErrorFeedback` takes.
WITH_FEEDBACK = [C.ErrorFeedback(each) for each in PLAIN if each.tells_unsent]

STRATEGIES = [*PLAIN, *WITH_FEEDBACK]

#: One of each class, with feedback if it takes that: for tests that take longer.
ONE_OF_EACH = [
    *(C.none, C.fp16, C.bf16),
    *(
        C.ErrorFeedback(each) if each.tells_unsent else each
        for kind in REGISTERED.values()
        for each in _settings(kind)[:1]
    ),
]
