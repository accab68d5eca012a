"""A job that adds process sets all the time, in which ranks die; it checks the sums in the sets.

Rank r (its number at the start) brings 2^r, so each sum tells which ranks are in it. The sets have
one rank, whose number stands for another process once a rank has died.
"""

import sys

import numpy as np

import hvdlite as hvd

hvd.init()
start = hvd.rank()
for step in range(int(sys.argv[1])):
    some = hvd.add_process_set([step % 2])
    if some.included():
        total = hvd.allreduce(np.full(3, 2.0**start), op=hvd.Sum, process_set=some)
        assert total.tolist() == [2.0**start] * 3, total
    holders = hvd.allgather_object((start, some.ranks, some.included()))
    assert sum(is_in for *_, is_in in holders) <= 1, holders
    hvd.remove_process_set(some)
print(f"left {start}: {hvd.size()}", flush=True)
hvd.shutdown()
