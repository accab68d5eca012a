"""Which optional packages a job uses: those that its settings ask for.

The core calls them through functions that it owns (`supervisor.choose`, `parts.divide`,
`observers.plan`, `options.presets`, `options.adasum`), and imports none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hvdlite.base import observers
from hvdlite.base.settings import Settings
from hvdlite.engine import supervisor
from hvdlite.gradients import options
from hvdlite.world import parts


def _supervise(settings: Settings) -> supervisor.Supervisor:
    if not (settings.elastic or settings.spares):
        return supervisor.Supervisor()
    from hvdlite.elastic.recovery import Recovery

    return Recovery()


def _divide(size: int) -> parts.Parts:
    if not size:
        return parts.Parts()
    from hvdlite.virtual.ranks import Turns

    return Turns(size)


def _plan(place: int, places: int) -> None:
    if os.environ.get("HVDLITE_REHEARSE"):
        from hvdlite.tools import rehearsal

        rehearsal.plant(os.environ, place, places)


def _presets() -> Mapping[str, Callable[[], options.Preset]]:
    from hvdlite.schedule.schedules import NAMED

    return NAMED


def _adasum() -> options.ExchangeSchedule:
    from hvdlite.schedule.schedules import EACH_CHANGE

    return EACH_CHANGE


supervisor.choose = _supervise
parts.divide = _divide
observers.plan = _plan
options.presets = _presets
options.adasum = _adasum
