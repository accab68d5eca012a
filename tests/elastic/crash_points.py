"""Small jobs over a simulated MPI, in which a rank dies at each point that it gets to.

Each of the three ranks r brings 2^r, so an average tells which ranks are in it. Three steps: an
exchange of gradients, one with compression and error feedback, and the average of a loss; then
all close their lanes. In the other job the ranks add a process set, and exchange in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from hvdlite.base.settings import Settings
from hvdlite.collectives.allreduce import describe_allreduce
from hvdlite.compression import Compression, ErrorFeedback, Parameter, Reduction, Strategy, TopK
from hvdlite.elastic import gathering, recovery
from hvdlite.engine import Engine
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.transport import liveness, mpi
from hvdlite.world.world import World
from tests import simulated_mpi
from tests.simulated_mpi import Clock, Comm, Crash, Job, Process

RANKS, STEPS = 3, 3
_MEMBERS = (0, 2)
_SETTINGS = Settings(shared_memory=False, overlap="0", cycle_time=0.0)
_CLOSING_SECONDS = 30.0

#: What a rank has got, in order, each with what it is.
Seen = list[tuple[str, list[float]]]


def crashes(seed: int | None = None, adds: bool = False) -> list[Crash]:
    """Return all ways in which a rank of the job can die.

    Args:
        seed: Of the order of turns.
        adds: Whether the job is that which adds a process set.
    """
    job = Job(RANKS, seed=seed)
    seen = run(job, adds)
    assert adds or len({repr(each) for each in seen.values()}) == 1, seen
    return [crash for process in job.processes for crash in process.crashes]


def check(planned: Sequence[Crash], seed: int | None = None) -> int:
    """Run the job with deaths; require that the others end with right values, equal on all.

    Returns:
        The number of ranks that are left.

    Raises:
        AssertionError: They do not, or hang.
    """
    job = Job(RANKS, planned, seed)
    seen = run(job)
    left = [each.number for each in job.processes if not each.is_dead]
    longest = max(seen.values(), key=len)
    for rank, each in seen.items():
        # One that has died has got the same, as far as it came.
        assert each == longest[: len(each)], (rank, each, longest)
        assert rank not in left or len(each) == len(longest), (rank, each, longest)
    before = set(range(RANKS))
    for what, values in longest:
        ranks = _ranks_in(values[0])
        assert all(_ranks_in(value) == ranks for value in values), (what, values)
        assert set(left) <= ranks <= before, (what, values, left)
        before = ranks
    return len(left)


def check_adding(planned: Sequence[Crash], seed: int | None = None) -> int:
    """Run the job that adds a process set, with deaths; require that all others have it.

    Returns:
        The number of ranks that are left.

    Raises:
        AssertionError: They have not, or hang.
    """
    job = Job(RANKS, planned, seed)
    seen = run(job, adds=True)
    left = [each.number for each in job.processes if not each.is_dead]
    # A member that has died is not among them, unless it did afterwards.
    members = [rank for rank in _MEMBERS if rank in left]
    for rank in left:
        ((_, ranks), (_, values)) = seen[rank]
        assert ranks in (members, list(_MEMBERS)), (rank, seen, left)
        assert ranks == seen[left[0]][0][1], (seen, left)
        found = _ranks_in(values[0]) if values else set()
        living = set(_MEMBERS) & set(left)
        assert living <= found <= set(_MEMBERS) if rank in _MEMBERS else not found, (seen, left)
    return len(left)


def run(job: Job, adds: bool = False) -> dict[int, Seen]:
    """Run a job; return what each rank has got, those that have died included."""
    seen: dict[int, Seen] = {}
    do = _add_set if adds else _train
    with _simulated(job):
        job.run(lambda process, comm: do(job, process, comm, seen))
    return seen


@contextlib.contextmanager
def _simulated(job: Job) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (recovery, gathering, liveness, mpi):
            stack.enter_context(mock.patch.object(module, "time", Clock(job)))
        # Its members are those of a process, and so is its lock.
        members = SimpleNamespace(
            lock=contextlib.nullcontext(), positions=dict, renumber=lambda *_: None
        )
        stack.enter_context(mock.patch.object(recovery, "membership", members))
        yield


def _recovery(world: World) -> recovery.Recovery:
    recovering = recovery.Recovery()
    recovering._pool = SimpleNamespace(places=world.ids)
    recovering.watch(simulated_mpi, world, _SETTINGS, lambda _: None)
    return recovering


def _train(job: Job, process: Process, comm: Comm, seen: dict[int, Seen]) -> None:
    world = World.split(simulated_mpi, comm)
    recovering = _recovery(world)
    engine = Engine(simulated_mpi, world, _SETTINGS, supervisor=recovering)
    recovering.add(engine)
    dense = _exchange(engine, "dense", 3, Compression.none)
    sparse = _exchange(engine, "sparse", 8, ErrorFeedback(TopK(0.25)))
    mine = seen.setdefault(process.number, [])
    job.count(process)
    try:
        _train_steps(process, engine, dense, sparse, mine)
    finally:
        engine.abandon()


def _train_steps(
    process: Process, engine: Engine, dense: GradientExchange, sparse: GradientExchange, mine: Seen
) -> None:
    for step in range(STEPS):
        for exchange in (dense, sparse):
            exchange.begin()
            slot = exchange.buckets.slot(0)
            slot[...] = 0
            slot[step : step + 2] = 2.0**process.number
            exchange.mark(0)
            assert exchange.finish() == [True]
            got = exchange.buckets.result_slot(0)[step : step + 2].tolist()
            mine.append((f"{exchange.buckets.label}, step {step}", got))
            # Wait for what ranks send without waiting: one lane at a time is at work.
            while engine.pending() and not process.is_dead:
                time.sleep(1e-5)
        loss = np.full(3, 2.0**process.number)
        describe = lambda name, loss=loss: describe_allreduce(loss, name, None)  # noqa: E731
        mine.append((f"loss, step {step}", engine.run("allreduce", "loss", describe).tolist()))
    for lane in engine.lanes:  # one after the other, so that the order of calls is always the same
        assert lane.close(_CLOSING_SECONDS), lane.name


def _add_set(job: Job, process: Process, comm: Comm, seen: dict[int, Seen]) -> None:
    world = World.split(simulated_mpi, comm)
    recovering = _recovery(world)
    engines = [Engine(simulated_mpi, world, _SETTINGS, supervisor=recovering)]
    recovering.add(engines[0])
    mine: Seen = []

    def make(part: World) -> Engine:
        return Engine(simulated_mpi, part, _SETTINGS, " of a process set", recovering)

    def enter(ids: Sequence[int], engine: Engine | None) -> None:
        mine.append(("ranks", [*map(float, ids)]))
        if engine is not None:
            engines.append(engine)

    job.count(process)
    try:
        recovering.form_part(_MEMBERS, world, make, enter)
        loss = np.full(3, 2.0**process.number)
        describe = lambda name: describe_allreduce(loss, name, None)  # noqa: E731
        found = [each.run("allreduce", "loss", describe).tolist() for each in engines[1:]]
        mine.append(("loss in the set", [value for each in found for value in each]))
        seen[process.number] = mine
        for engine in reversed(engines):
            for lane in engine.lanes:
                assert lane.close(_CLOSING_SECONDS), lane.name
    finally:
        for engine in engines:
            engine.abandon()


def _exchange(engine: Engine, name: str, size: int, strategy: Strategy) -> GradientExchange:
    namespace: Any = SimpleNamespace(gradients=engine.gradients, settings=_SETTINGS)
    parameter = Parameter("weight", (size,), np.dtype(np.float32))
    return GradientExchange(namespace, name, [parameter], strategy, Reduction())


def _ranks_in(average: float) -> set[int]:
    """Return the ranks that an average is over.

    Raises:
        AssertionError: It is none.
    """
    for mask in range(1, 2**RANKS):
        ranks = {rank for rank in range(RANKS) if mask >> rank & 1}
        if np.isclose(average, np.mean([2.0**rank for rank in ranks]), rtol=1e-6):
            return ranks
    raise AssertionError(f"{average} is an average of no ranks")
