from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Sum
from hvdlite.compression import (
    ByParameter,
    Compression,
    Conversion,
    ErrorFeedback,
    Parameter,
    Reduction,
)
from hvdlite.gradients.options import make_options
from hvdlite.schedule import Schedule
from hvdlite.schedule.schedules import LocalSchedule, partition

NONE, AVERAGE = Compression.none, Reduction()


class Own(LocalSchedule):
    """A user's schedule, which is no dataclass."""


def check(schedule, strategy, reduction, passes=1, sparse_as_dense=False):
    options = make_options(strategy, schedule, Conversion(), reduction, passes, sparse_as_dense)
    return options.schedule, options.passes


@pytest.mark.parametrize(
    ("make", "name", "wrong"),
    [
        (Schedule.Accumulate, "passes", 0),
        (Schedule.PartialSync, "parts", 0),
        (Schedule.PartialSync, "bytes", 1.5),
        (Schedule.LocalSGD, "every", True),
        (partial(Schedule.LocalSGD, 2), "start", 0.5),
        (Schedule.DiLoCo, "every", 2.0),
        (partial(Schedule.DiLoCo, 2), "outer_lr", 0.0),
        (partial(Schedule.DiLoCo, 2), "outer_momentum", 1.0),
    ],
)
def test_what_is_out_of_range(make, name, wrong):
    for value in ("1%", [1], -1, math.nan, wrong):
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))} is not (a|an) "):
            make(**{name: value})


def test_partial_synchronisation_is_by_parts_or_by_bytes():
    for arguments in ((), (2, 100)):
        with pytest.raises(ValueError, match=r"either parts=\.\.\. or bytes=\.\.\."):
            Schedule.PartialSync(*arguments)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Schedule.EveryStep(), "Schedule.EveryStep()"),
        (Schedule.Accumulate(3), "Schedule.Accumulate(3)"),
        (Schedule.PartialSync(parts=4), "Schedule.PartialSync(parts=4)"),
        (
            Schedule.PartialSync(bytes=9, momentum=True),
            "Schedule.PartialSync(bytes=9, momentum=True)",
        ),
        (Schedule.LocalSGD(8), "Schedule.LocalSGD(every=8)"),
        (Schedule.LocalSGD(every=8, start=2), "Schedule.LocalSGD(every=8, start=2)"),
        (
            Schedule.DiLoCo(5),
            "Schedule.DiLoCo(every=5, outer_lr=0.7, outer_momentum=0.9)",
        ),
    ],
)
def test_schedules_are_values_whose_text_has_all_settings(schedule, text):
    assert repr(schedule) == text
    again = eval(text, {"Schedule": Schedule})
    assert again == schedule
    assert hash(again) == hash(schedule)


@pytest.mark.parametrize("sizes", [(), (0, 0, 0), (7,), (9, 1, 1, 1, 1, 1, 1, 3), (4, 4, 0, 5)])
@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_parts_are_about_equal_and_have_everything_once(sizes, parts):
    parts_of = partition(sizes, parts)
    assert len(parts_of) == min(parts, len(sizes))
    assert sorted(member for part in parts_of for member in part) == list(range(len(sizes)))
    assert all(parts_of)
    totals = [sum(sizes[member] for member in part) for part in parts_of]
    assert max(totals, default=0) - min(totals, default=0) <= max(sizes, default=0)


def test_the_largest_are_placed_first():
    assert partition((1, 1, 9, 1), 2) == ((2,), (0, 1, 3))
    assert partition((3, 5, 4, 2), 2) == ((1, 3), (0, 2))  # 5, then 4 and 3, then 2


def test_a_number_of_bytes_gives_the_number_of_parts():
    parameters = [Parameter(str(n), (25,), np.dtype(np.float32)) for n in range(8)]
    turns = [Schedule.PartialSync(bytes=250).due(step, parameters) for step in (1, 2, 3, 4, 5)]
    assert sorted(member for turn in turns[:4] for member in turn) == list(range(8))
    assert turns[4] == turns[0]
    assert Schedule.PartialSync(bytes=10**9).due(3, parameters) == tuple(range(8))
    assert Schedule.PartialSync(parts=2).due(1, []) == ()


def test_what_has_no_local_steps():
    assert check(None, NONE, AVERAGE, 2) == (None, 2)
    assert check(Schedule.EveryStep(), NONE, AVERAGE, 2) == (None, 2)
    assert check(Schedule.Accumulate(3), NONE, AVERAGE) == (None, 3)
    with pytest.raises(ValueError, match=r"backward_passes_per_step=2 mean the same"):
        check(Schedule.Accumulate(3), NONE, AVERAGE, 2)
    for other in (3, "LocalSGD", Schedule, Schedule.LocalSGD):
        with pytest.raises(TypeError, match=r"use one of hvd\.Schedule"):
            check(other, NONE, AVERAGE)


@pytest.mark.parametrize(
    "schedule",
    [Schedule.PartialSync(parts=2), Schedule.LocalSGD(2), Schedule.DiLoCo(2), Own()],
    ids=repr,
)
def test_what_does_not_go_with_local_steps(schedule):
    for op in (Sum, Adasum):
        with pytest.raises(ValueError, match=f"which op=hvd.{op.name.capitalize()} does not"):
            check(schedule, NONE, Reduction(op))
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=2\.0 is about gradients"):
        check(schedule, NONE, Reduction(predivide=2.0))
    with pytest.raises(ValueError, match="sparse_as_dense=True is about"):
        check(schedule, NONE, AVERAGE, sparse_as_dense=True)
    for good in (Compression.fp16, ByParameter(lambda parameter: NONE, [NONE, Compression.bf16])):
        assert check(schedule, good, AVERAGE) == (schedule, 1)


def test_sparse_gradients_are_exchanged_before_the_first_local_step():
    schedule = Schedule.LocalSGD(2, start=1)
    assert check(schedule, NONE, AVERAGE, sparse_as_dense=True) == (schedule, 1)


def test_only_changes_travel_by_what_is_for_gradients():
    feedback = ErrorFeedback(Compression.fp16)
    diloco = Schedule.DiLoCo(2)
    assert check(diloco, feedback, AVERAGE) == (diloco, 1)
    for schedule in (Schedule.PartialSync(parts=2), Schedule.LocalSGD(2), Schedule.LocalSGD(2, 9)):
        with pytest.raises(ValueError, match=r"and ErrorFeedback.*is for gradients only"):
            check(schedule, feedback, AVERAGE)
