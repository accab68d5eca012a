"""Schedules: when ranks exchange gradients, and when they exchange weights instead."""

from __future__ import annotations

from hvdlite.schedule.presets import singa
from hvdlite.schedule.schedules import Schedule

__all__ = ["Schedule", "singa"]
