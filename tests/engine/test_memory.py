"""Memory that two operations on their way use, and one of them writes, is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Sum
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.engine import operation
from hvdlite.engine.memory import Extent, MemoryInUse
from hvdlite.engine.operation import Signature
from hvdlite.engine.queue import Queue
from hvdlite.world import world
from tests.harness import ranks


def test_it_finds_what_a_comparison_with_all_others_finds():
    drawn = random.Random(1)
    pending = {}
    memory = MemoryInUse()
    refused = 0
    for user in range(3000):
        start = drawn.randrange(400)
        writer = drawn.choice([None, user, "broadcast"])
        new = Extent(start, start + drawn.randrange(1, 60), writer)
        clashes = {
            other
            for other, each in pending.items()
            if each.start < new.stop and new.start < each.stop and each.writer != new.writer
        }
        found = memory.add(user, [new])
        assert found in clashes if clashes else found is None
        refused += bool(clashes)
        if not clashes:
            pending[user] = new
        for ended in drawn.sample(sorted(pending), min(len(pending), drawn.randrange(2))):
            memory.remove(ended, [pending.pop(ended)])
    assert 500 < refused < 2500
    assert len(memory) == len(pending)


def test_what_has_ended_is_forgotten_although_something_stays():
    queue = Queue(0)
    stays = Allreduce("stays", np.zeros(3), Sum)
    queue.add(stays)
    array = np.zeros(9)
    for number in range(1000):
        made = Allreduce(f"{number}", array, Sum, out=array)
        queue.add(made)
        with pytest.raises(ValueError, match=f"'again' uses the same memory as '{number}'"):
            queue.add(Allreduce("again", array[4:7], Sum))
        queue.remove([made])
        queue.add(made)  # an operation that has ended may be submitted again
        queue.remove([made])
    assert len(queue._memory) == 1  # what has ended is let go of
    assert "allreduce.again" not in queue.operations


@ranks(2)
def test_the_second_is_refused_and_the_first_goes_on():
    hvd.init()
    whole, comm = np.ones(8), world.current().comm
    if hvd.rank() == 1:  # so that the first stays on its way
        comm.bcast(None)
    first = hvd.allreduce_async(whole[:5], name="first", op=hvd.Sum, out=whole[:5])
    calls = [
        lambda: hvd.allreduce(whole[:5], name="same", op=hvd.Sum),
        lambda: hvd.allreduce(whole[4:], name="overlapping", op=hvd.Sum, out=whole[4:]),
        lambda: hvd.broadcast_async(whole[:5], 0, name="sent", out=whole[:5]),
        lambda: hvd.allgather(whole, name="gathered"),
        lambda: hvd.alltoall(whole, name="scattered"),
        lambda: hvd.reducescatter(whole, name="reduced"),
        lambda: hvd.allreduce(
            whole[2:3], name="half", op=hvd.Sum, compression=hvd.Compression.fp16
        ),
        lambda: hvd.grouped_allreduce([np.ones(2), whole[3:4]], name="group", op=hvd.Sum),
        lambda: hvd.allreduce(np.zeros(3), name="out", op=hvd.Sum, out=whole[1:4]),
    ]
    if hvd.rank() == 0:
        for call in calls:
            with pytest.raises(ValueError, match="is still on its way, and a result is written"):
                call()
        comm.bcast(None)
    assert first.wait().tolist() == [2.0] * 5
    assert whole.tolist() == [2.0] * 5 + [1.0] * 3
    with pytest.raises(ValueError, match="uses the same memory twice"):
        hvd.grouped_allreduce([whole, whole], op=hvd.Sum, outs=[whole, whole])


@ranks(2)
def test_what_only_reads_or_writes_the_same_may_overlap():
    hvd.init()
    shared, tied = np.arange(4.0), np.full(4, float(hvd.rank()))
    handles = [hvd.allreduce_async(shared[k:], name=f"{k}", op=hvd.Sum) for k in range(3)]
    sent = [hvd.broadcast_async(tied, 1, name=f"tied {k}", out=tied) for k in range(2)]
    for k, handle in enumerate(handles):
        assert handle.wait().tolist() == (2 * shared[k:]).tolist()
    assert [handle.wait().tolist() for handle in sent] == [[1.0] * 4] * 2


def test_names_are_remembered_for_all_signatures_together():
    signatures = [Signature((("the operation", "probe"), ("shape", size))) for size in range(50)]

    class Probe(operation.Operation):
        def execute(self, transport, payloads):
            """Do nothing."""

    for number in range(400):
        for signature in signatures:
            name = f"noname.{number}"
            assert Probe(name, signature).key == f"probe.{name}"
    assert sum(len(signature.known) for signature in signatures) <= operation._MAX_DIGESTS
