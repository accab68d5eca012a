"""When ranks exchange what: in every step, or after steps of their own."""

from __future__ import annotations

from hvdlite.schedule.base import Accumulate, EveryStep, ExchangeSchedule
from hvdlite.schedule.local import DiLoCo, LocalSGD, PartialSync
from hvdlite.schedule.local_steps import LocalSteps, Weights
from hvdlite.schedule.namespace import Schedule, check_schedule
from hvdlite.schedule.presets import CompressionArgument, Preset, check_exchange, singa
from hvdlite.schedule.saving import ExchangeState

__all__ = [
    "Accumulate",
    "CompressionArgument",
    "DiLoCo",
    "EveryStep",
    "ExchangeSchedule",
    "ExchangeState",
    "LocalSGD",
    "LocalSteps",
    "PartialSync",
    "Preset",
    "Schedule",
    "Weights",
    "check_exchange",
    "check_schedule",
    "singa",
]
