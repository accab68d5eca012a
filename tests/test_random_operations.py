"""Many operations of every kind, submitted in another order by every thread of every rank."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import ReduceOp
from tests.harness import ranks
from tests.references import DTYPES, cases, check_reduction, sample

THREADS = 4
SHAPES = ((), (0,), (1,), (3,), (2, 5), (64,), (3, 0, 2), (1000,))
KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce")
REDUCTIONS = list(cases())


@dataclass(frozen=True)
class Task:
    """One operation, as every rank knows it."""

    number: int
    kind: str
    everybody: bool  # or the half of the ranks that a rank is in
    dtype: str
    op: ReduceOp
    shape: tuple[int, ...]
    root: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def given(self, rank: int) -> Any:
        return sample(rank, self.dtype, self.shape, seed=self.number)

    def submit(self, rank: int, process_set: Any) -> Any:
        own, where = self.given(rank), {"name": self.name, "process_set": process_set}
        members = process_set.ranks
        if self.kind == "allreduce":
            return hvd.allreduce_async(own, op=self.op, **where)
        if self.kind == "grouped_allreduce":
            return hvd.grouped_allreduce_async([own, np.int8([100])], op=self.op, **where)
        if self.kind == "allgather":
            return hvd.allgather_async(self._rows(rank), **where)
        if self.kind == "broadcast":
            return hvd.broadcast_async(own, members[self.root % len(members)], **where)
        if self.kind == "alltoall":
            splits = [self._split(rank, member) for member in members]
            return hvd.alltoall_async(np.full((sum(splits), 2), rank), splits, **where)
        return hvd.reducescatter_async(np.atleast_1d(own), op=self.op, **where)

    def _rows(self, rank: int) -> Any:
        return sample(rank, self.dtype, ((rank + self.number) % 3, 2), seed=self.number)

    def _split(self, sender: int, receiver: int) -> int:
        return (sender + 2 * receiver + self.number) % 4

    def check(self, result: Any, rank: int, members: list[int]) -> None:
        given = [self.given(member) for member in members]
        if self.kind == "allreduce":
            check_reduction(result, given, self.op)
        elif self.kind == "grouped_allreduce":
            check_reduction(result[0], given, self.op)
            check_reduction(result[1], [np.int8([100])] * len(members), self.op)
        elif self.kind == "allgather":
            np.testing.assert_array_equal(
                result, np.concatenate([self._rows(member) for member in members])
            )
        elif self.kind == "broadcast":
            np.testing.assert_array_equal(result, given[self.root % len(members)])
        elif self.kind == "alltoall":
            rows, received = result
            assert list(received) == [self._split(member, rank) for member in members]
            np.testing.assert_array_equal(rows[:, 0], np.repeat(members, received))
        else:
            rows = [np.atleast_1d(array) for array in given]
            base, longer = divmod(len(rows[0]), len(members))
            position = members.index(rank)
            start = position * base + min(position, longer)
            stop = start + base + (position < longer)
            check_reduction(result, [array[start:stop] for array in rows], self.op)


def tasks(count: int) -> list[Task]:
    """Return the same tasks on every rank."""
    generator = random.Random(1)
    made = []
    for number in range(count):
        kind = generator.choices(KINDS, weights=(8, 1, 1, 1, 2, 1))[0]
        dtype, op = generator.choice(REDUCTIONS)
        if kind == "reducescatter" and op is hvd.Adasum:
            op = hvd.Sum
        if kind == "grouped_allreduce" and op is hvd.Adasum:  # which int8 has not
            op = hvd.Product
        if kind in ("allgather", "broadcast"):
            dtype = generator.choice(DTYPES)
        shape = generator.choice(SHAPES)
        task = Task(number, kind, generator.random() < 0.5, dtype, op, shape, number % 7)
        made.append(task)
    return made


def run(count: int) -> None:
    """Submit and check ``count`` operations on every rank."""
    hvd.shutdown()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    halves = [hvd.add_process_set(range(first, size, 2)) for first in (0, 1)]
    mine = halves[rank % 2]
    shuffled = tasks(count)
    random.Random(1000 + rank).shuffle(shuffled)
    handles: dict[Task, Any] = {}

    def submit(share: list[Task]) -> None:
        for task in share:
            chosen = hvd.global_process_set if task.everybody else mine
            handles[task] = task.submit(rank, chosen)

    threads = [
        threading.Thread(target=submit, args=(shuffled[first::THREADS],))
        for first in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == count
    for task, handle in handles.items():
        members = list(range(size)) if task.everybody else mine.ranks
        try:
            task.check(hvd.synchronize(handle), rank, members)
        except AssertionError as error:
            raise AssertionError(f"{task}: {error}") from error
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == [size]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@ranks(2, 3, 4)
def test_a_thousand():
    run(1000)
