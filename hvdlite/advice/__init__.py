"""Advice on which compression pays on this machine's links, for a model's gradients."""

from __future__ import annotations

from hvdlite.advice.advisor import Advice, Measurement, advise

__all__ = ["Advice", "Measurement", "advise"]
