"""A job in which ranks die; what every rank has computed is checked against a closed form.

Each step sums arrays of all sizes, in place and not, named and not, one by one and in a burst, and
gathers, broadcasts and sends rows to each. Rank r (its number at the start) brings 2^r, so each sum
tells which ranks are in it. At the end the ranks that are left compare all that they have computed.
"""

import hashlib
import math
import os
import re
import sys

import numpy as np

import hvdlite as hvd
from hvdlite.errors import HorovodInternalError
from hvdlite.world import world

steps = int(sys.argv[1])
pairs = hvd.ProcessSet([0, *range(2, int(os.environ["OMPI_COMM_WORLD_SIZE"]))])
hvd.init(process_sets=[pairs])
start, alive = hvd.rank(), set(range(hvd.size()))
seen = hashlib.sha256()


def check(total: float, what: str) -> None:
    """Require that a sum is that of the ranks which lived before it, or of those that live now."""
    global alive
    ranks = {rank for rank in range(8) if int(total) >> rank & 1}
    assert {start} <= ranks <= alive, f"{what}: {ranks} after {alive}"
    alive = ranks
    seen.update(repr((what, sorted(ranks))).encode())


for step in range(steps):
    for size in (1, 1000, 300_000):
        mine = np.full(size, 2.0**start, np.float32)
        total = hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{size}")
        assert (total == total[0]).all()
        assert (mine == 2.0**start).all()
        check(total[0], f"{step} sum {size}")
        hvd.allreduce(mine, op=hvd.Sum, out=mine)
        assert (mine == mine[0]).all()
        check(mine[0], f"{step} in place {size}")
    burst = [
        hvd.allreduce_async(np.full(500, 2.0**start), op=hvd.Sum, name=f"burst.{number}")
        for number in range(20)
    ]
    for handle in burst:
        check(handle.wait()[0], f"{step} burst")
    rows = hvd.allgather(np.full((1, 2), 2.0**start))
    check(rows[:, 0].sum(), f"{step} gather")
    mean = hvd.allreduce(np.ones(10))
    assert (mean == 1.0).all(), mean
    ranks = world.current().ids
    mine = [(2.0**start, to) for to in ranks for _ in range(1 + to)]
    found, received = hvd.alltoall(np.array(mine), [1 + to for to in ranks])
    assert (found[:, 1] == start).all(), found
    assert {*received.tolist()} <= {0, 1 + start}, received
    check(found[:, 0].sum() / (1 + start), f"{step} alltoall")
    objects = hvd.allgather_object(start)
    assert objects == sorted(objects)
    check(sum(2**old for old in objects), f"{step} objects")
    if pairs.included():
        inside = hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=pairs, name="inside")
        seen.update(repr(float(inside[0])).encode() if inside[0] != 1 else b"")
    try:
        sent = hvd.broadcast(np.full(70_000, 2.0**start), root_rank=0)
        assert (sent == sent[0]).all()
    except HorovodInternalError as error:
        if not re.search(r"rank \d, which was to send it, has died", str(error)):
            raise
        seen.update(b"lost")  # only the root had it
    try:
        sent = hvd.broadcast(np.full(100, 2.0**start), root_rank=hvd.size() - 1)
        assert (sent == sent[0]).all()
        assert math.log2(sent[0]) in alive
        seen.update(sent)
    except HorovodInternalError as error:
        # The root has died, or ranks have come before and after a death, and mean different roots.
        if not re.search(
            "the ranks disagree .*: root_rank is|which was to send it, has died", str(error)
        ):
            raise
        seen.update(b"lost")

digests = hvd.allgather_object((start, seen.hexdigest(), pairs.included()))
members = {digest for _, digest, is_member in digests if is_member}
others = {digest for _, digest, is_member in digests if not is_member}
assert max(len(members), len(others)) <= 1, digests
print(f"left {start}: {hvd.size()}", flush=True)
hvd.shutdown()
