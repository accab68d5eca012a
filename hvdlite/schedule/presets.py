"""Apache SINGA's modes of distributed training as presets of a compression and a schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hvdlite.compression import Compression, ErrorFeedback, Strategy, Threshold, TopK
from hvdlite.gradients.options import Preset
from hvdlite.schedule.schedules import PartialSync


def singa(dist_option: str = "fp32", spars: float = 0.05, corr: bool = True) -> Preset:
    """Return the preset for a mode of Apache SINGA's ``DistOpt``, for ``compression=``.

    The name alone, ``compression="sparseTopK"``, is the preset with the default values.

    Args:
        dist_option: ``"fp32"``: gradients unchanged; ``"fp16"``: gradients as 16-bit floats;
            ``"partialUpdate"``: local steps, with one part of the weights averaged after each;
            ``"sparseTopK"``: the largest gradients; ``"sparseThreshold"``: the gradients at or
            above a threshold.
        spars: for ``"sparseTopK"`` the fraction to send, for ``"sparseThreshold"`` the threshold.
        corr: whether the sparse modes add what they did not send to the next gradients.

    Raises:
        ValueError: there is no such name, or ``spars`` is out of range.
    """
    if dist_option in _SPARSE:
        strategy = _SPARSE[dist_option](spars)
        return Preset(ErrorFeedback(strategy) if corr else strategy)
    if dist_option in _OTHERS:
        return _OTHERS[dist_option]
    raise ValueError(
        f"{dist_option!r} is none of SINGA's names: {', '.join(NAMED)}; for others use "
        "hvd.Compression"
    )


_SPARSE: dict[str, Callable[[float], Strategy]] = {
    "sparseTopK": TopK,
    "sparseThreshold": Threshold,
}
_OTHERS = {
    "fp32": Preset(Compression.none),
    "fp16": Preset(Compression.fp16),
    # SINGA averages at most 2**21 elements of float32 after a step.
    "partialUpdate": Preset(Compression.none, PartialSync(bytes=2**23)),
}
#: What makes the preset of a mode with the default values.
NAMED = {mode: partial(singa, mode) for mode in (*_OTHERS, *_SPARSE)}
