"""The explanation of a difference between the ranks' replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite.base.arrays import slice_bounds
from hvdlite.engine.agreement import find_difference
from hvdlite.engine.operation import Signature
from hvdlite.errors import by_value, ranks_text

if TYPE_CHECKING:
    from hvdlite.gradients.replicas import ReplicaCheck

#: With it labels of weights begin.
WEIGHT = "the weight "
_CHUNKS = 64  # in which the first element that differs is looked for

#: Returns what a function makes of each rank's comparison, by rank; collective.
Collect = Callable[[Callable[["ReplicaCheck"], Any]], dict[int, Any]]


@dataclass(frozen=True)
class _Report:
    """A rank's message to the others about a replica that differs."""

    remedy: str
    options: Sequence[tuple[str, Any]]
    values: Mapping[str, tuple[str, tuple[int, ...], int]]


def explain(gather: Collect, behind: Sequence[int], step: int) -> str:
    """Return the first difference, since when there is one, its causes and what to do."""
    reports: dict[int, _Report] = gather(_report)
    first = next(iter(reports.values()))
    values = [each.values for each in reports.values()]
    labels = dict.fromkeys(label for each in values for label in each)  # in a common order
    differing = [label for label in labels if len({each.get(label) for each in values}) > 1]
    label: str | None = None
    element = 0
    if len({repr(each.options) for each in reports.values()}) > 1:
        what, found = find_difference(
            {rank: Signature(each.options) for rank, each in reports.items()}
        )
    elif differing:
        label = differing[0]
        what, found, element = _first_element(label, reports, gather)
    else:
        what, found = "a weight or the optimizer's state", "being changed by another thread"
    since = min(gather(lambda own: own.equal_since(label, element)).values())
    history = f" (equal in step {since}, apart in step {step})" if since else ""
    cause = _cause(label is None, bool(since), _count(differing, labels), first.remedy)
    if behind:
        cause = (
            f"{ranks_text(behind)} took part in fewer steps than the others, after join(), say. "
            f"Before all go on together, call {first.remedy} on all ranks, with a root_rank that "
            "has made all steps"
        )
    meant = "processors of different kinds round differently"
    if label is None:
        meant = "the optimizers are meant to differ"
    return (
        f"the ranks train replicas that differ: {what} is {found}{history}; {cause}. Where "
        f"{meant}, HVDLITE_CHECK_RANKS=warn makes this error a warning, and "
        "HVDLITE_CHECK_RANKS=off leaves the comparison out"
    )


def _count(differing: Sequence[str], labels: Iterable[str]) -> str:
    """Return how many weights differ, and how many arrays of the optimizer's state."""
    counts = {True: [0, 0], False: [0, 0]}  # those that differ, and all
    for label in labels:
        counts[label.startswith(WEIGHT)][1] += 1
    for label in differing:
        counts[label.startswith(WEIGHT)][0] += 1
    nouns = {True: "weights", False: "arrays of the optimizer's state"}
    return " and ".join(f"{n} of {of} {nouns[kind]}" for kind, (n, of) in counts.items() if n)


def _cause(is_option: bool, were_equal: bool, count: str, remedy: str) -> str:
    if is_option and not were_equal:
        also = f", and call {remedy}, because {count} differ, too" if count else ""
        return f"make the same optimizer, with the same arguments, on all ranks{also}"
    if not were_equal:
        return (
            f"{count} differ. Probably they were not broadcast, or were changed on some ranks "
            f"afterwards: call {remedy} on all ranks, before training or after its first step"
        )
    if is_option:
        return (
            "some ranks have changed it between these steps, and others have not: by a scheduler "
            "that decides by each rank's own metric (average the metric over the ranks first: "
            "hvd.allreduce(loss), in Keras MetricAverageCallback before it), by an assignment, or "
            f"by load_state_dict(). Do the same on all ranks, and call {remedy} once"
            + (f": {count} differ by now" if count else "")
        )
    return (
        f"{count} differ. They were equal before, so no broadcast is missing: some ranks have "
        "changed values between these steps, and others have not, in place (a weight, "
        "Embedding(max_norm=...), a gradient after its exchange, as a clip by the rank's own norm "
        f"does) or by load_state_dict(). Do the same on all ranks, and call {remedy} once"
    )


def _report(check: ReplicaCheck) -> _Report:
    return _Report(check.remedy, check.options, check.restart().describe())


def _first_element(
    label: str,
    reports: Mapping[int, _Report],
    gather: Collect,
) -> tuple[str, str, int]:
    """Return what differs in an array, which rank has which value, and the element's number."""
    absent = "absent", (), 0
    kinds = {rank: each.values.get(label, absent)[0] for rank, each in reports.items()}
    if len(set(kinds.values())) > 1:
        return label, ", ".join(by_value(kinds)), 0
    shape = next(iter(reports.values())).values[label][1]
    start, stop = 0, math.prod(shape)
    while stop - start > 1:
        count = min(_CHUNKS, stop - start)
        bounds = [start + bound for bound in slice_bounds(stop - start, count)]
        sums = gather(partial(_checksums, label, bounds))
        unequal = (n for n, each in enumerate(zip(*sums.values(), strict=True)) if len({*each}) > 1)
        chunk = next(unequal, 0)
        start, stop = bounds[chunk : chunk + 2]
    texts = gather(lambda own: own.rotation.text(label, start))
    is_clear = len({text for text, _ in texts.values()}) == len({*texts.values()})
    found = {rank: text if is_clear else f"{text} (0x{hex})" for rank, (text, hex) in texts.items()}
    index = [int(each) for each in np.unravel_index(start, shape)]
    what = f"element {index} of {label}" if index else label
    return what, ", ".join(by_value(found)), start


def _checksums(label: str, bounds: Sequence[int], check: ReplicaCheck) -> list[int]:
    return check.rotation.checksums(label, bounds)
