"""Schedules: when ranks exchange gradients, and when they exchange weights instead."""

from __future__ import annotations

from hvdlite.schedule.arguments import (
    CompressionArgument,
    Preset,
    check_exchange,
    check_schedule,
    check_unweighted,
    singa,
)
from hvdlite.schedule.local_steps import LocalSteps, Moment, Weights
from hvdlite.schedule.schedules import (
    EACH_CHANGE,
    Accumulate,
    DiLoCo,
    EveryStep,
    ExchangeSchedule,
    LocalSGD,
    PartialSync,
    Schedule,
)

__all__ = [
    "EACH_CHANGE",
    "Accumulate",
    "CompressionArgument",
    "DiLoCo",
    "EveryStep",
    "ExchangeSchedule",
    "LocalSGD",
    "LocalSteps",
    "Moment",
    "PartialSync",
    "Preset",
    "Schedule",
    "Weights",
    "check_exchange",
    "check_schedule",
    "check_unweighted",
    "singa",
]
