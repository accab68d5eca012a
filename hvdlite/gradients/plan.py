"""The plan: which gradients travel together, and the description of it that ranks compare."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from hvdlite.base.arrays import describe
from hvdlite.base.settings import Settings
from hvdlite.compression import Parameter, Reduction, Strategy

#: Bytes. TensorFlow copies an array that does not lie at a multiple of it.
ALIGNMENT = 64


def plan_for(
    parameters: Sequence[Parameter], strategy: Strategy, settings: Settings
) -> list[list[int]]:
    """Pack parameters into buckets, in the reverse of their order.

    Gradients are computed in that order, so the first bucket is complete first; it is small,
    so that communication starts early (Li et al. 2020, arXiv:2006.15704). Only parameters of one
    dtype, whose gradients travel by one strategy, share a bucket.

    Returns:
        For each bucket, in the order of exchange, the positions of its parameters: first those
        whose sizes are multiples of `ALIGNMENT`, so that they all lie aligned.
    """
    cap = settings.fusion_threshold
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for position in reversed(range(len(parameters))):
        parameter = parameters[position]
        kind = parameter.dtype.name, strategy.choose(parameter)
        members, filled = open_buckets.pop(kind, ([], 0))
        members.append(position)
        filled += parameter.nbytes
        if filled >= (cap if buckets else min(cap, settings.first_bucket_size)):
            buckets.append(members)
        else:
            open_buckets[kind] = (members, filled)
    buckets += [members for members, _ in open_buckets.values()]
    return [
        sorted(members, key=lambda position: parameters[position].nbytes % ALIGNMENT != 0)
        for members in buckets
    ]


def describe_exchange(
    parameters: Sequence[Parameter], strategy: Strategy, reduction: Reduction
) -> tuple[tuple[str, Any], ...]:
    """Return the pairs of a label and a value that must be equal on all ranks.

    Together with settings that `init` compares, they determine the plan.
    """
    return (
        ("op", reduction.op.name.capitalize()),
        ("gradient_predivide_factor", reduction.predivide),
        ("compression", strategy.name),
        *(
            (f"parameter {number}", _describe(parameter, strategy))
            for number, parameter in enumerate(parameters)
        ),
        ("the number of parameters", len(parameters)),
    )


def _describe(parameter: Parameter, strategy: Strategy) -> str:
    """Describe a parameter; a rule may give each a strategy of its own."""
    chosen = strategy.choose(parameter)
    by = "" if chosen is strategy else f" by {chosen.name}"
    return f"{parameter.name!r} {describe(parameter)}{by}"


def describe_sources(
    sources: Sequence[Parameter], sparse: Collection[int] = ()
) -> tuple[tuple[str, Any], ...]:
    """Describe everything that a tape or an optimizer has gradients of, in any framework.

    Args:
        sparse: positions of those that do not travel in buckets.

    Returns:
        Pairs, for the argument ``also`` of `GradientBuckets`.
    """
    return (
        *(
            (f"source {number}", f"{source.name!r} {describe(source)}")
            for number, source in enumerate(sources)
        ),
        ("the number of sources", len(sources)),
        *(
            (
                f"the gradient of {source.name!r} (dense everywhere with sparse_as_dense=True)",
                "IndexedSlices" if number in sparse else "dense or None",
            )
            for number, source in enumerate(sources)
        ),
    )
