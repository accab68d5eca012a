"""Schedules: when ranks exchange gradients, and when they exchange weights instead."""

from __future__ import annotations

from hvdlite.schedule.schedules import Schedule, singa

__all__ = ["Schedule", "singa"]
