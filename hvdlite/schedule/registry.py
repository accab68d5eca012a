"""The registry of schedules: `Schedule` has all that ``schedule=`` takes."""

from __future__ import annotations

from hvdlite.schedule.schedules import Accumulate, DiLoCo, EveryStep, LocalSGD, PartialSync


class Schedule:
    """The schedules that ``schedule=`` takes, the same for every framework.

    An example: ``hvd.DistributedOptimizer(optimizer, schedule=hvd.Schedule.LocalSGD(every=8))``.
    """

    EveryStep = EveryStep
    Accumulate = Accumulate
    PartialSync = PartialSync
    LocalSGD = LocalSGD
    DiLoCo = DiLoCo
