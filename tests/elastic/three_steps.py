"""Three steps of training without a framework, for deaths at each point that a rank gets to.

Two buckets of gradients per step, one of them compressed with error feedback, and the mean of a
loss. Rank r (its number at the start) brings 2^r, so each average tells which ranks are in it.
"""

import hashlib
from types import SimpleNamespace

import numpy as np

import hvdlite as hvd
from hvdlite.base.settings import Settings
from hvdlite.compression import ErrorFeedback, Parameter, Reduction, TopK
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange

FLOAT = np.dtype(np.float32)
hvd.init()
start, alive = hvd.rank(), set(range(hvd.size()))
engine = SimpleNamespace(gradients=runtime.engine().gradients, settings=Settings())
dense = GradientExchange(
    engine, "dense", [Parameter("a", (70_000,), FLOAT)], hvd.Compression.none, Reduction()
)
sparse = GradientExchange(
    engine, "sparse", [Parameter("b", (64,), FLOAT)], ErrorFeedback(TopK(0.25)), Reduction()
)
seen = hashlib.sha256()


def check(average: float, what: str) -> None:
    """Require that an average is over ranks that lived before it, this one among them."""
    global alive
    for ranks in subsets(alive):
        if np.isclose(average, np.mean([2.0**rank for rank in ranks]), rtol=1e-6):
            alive = ranks
            seen.update(repr((what, sorted(ranks))).encode())
            return
    raise AssertionError(f"{what}: {average} is an average of none of {alive}")


def subsets(ranks: set[int]) -> list[set[int]]:
    """Return the subsets that this rank is in."""
    masks = range(2**8)
    return [
        chosen
        for mask in masks
        if start in (chosen := {rank for rank in ranks if mask >> rank & 1})
        and all(not mask >> rank & 1 for rank in range(8) if rank not in ranks)
    ]


for step in range(3):
    for exchange in (dense, sparse):
        exchange.begin()
        slot = exchange.buckets.slot(0)
        slot[...] = 2.0**start if exchange is dense else np.arange(64) + step
        exchange.mark(0)
        assert exchange.finish() == [True]
    average = dense.buckets.result_slot(0)
    assert (average == average[0]).all()
    check(average[0], f"{step} gradients")
    seen.update(sparse.buckets.result_slot(0).tobytes())
    check(float(hvd.allreduce(np.full(3, 2.0**start), name="loss")[0]), f"{step} loss")
digests = hvd.allgather_object(seen.hexdigest())
assert len(set(digests)) == 1, digests
print(f"left {start}: {hvd.size()}", flush=True)
