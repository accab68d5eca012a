"""Measure what the callback of `examples/jax_optax.py` adds to a step, beside a bare exchange.

``hvdliterun -np 2 python -m tests.benchmarks.jax_callback`` takes steps of ``optax.sgd`` on ten
arrays in turns: inside ``jax.jit`` on the rank's own gradients ("alone"), the same over the wrapper
("distributed"), and the exchange of as many bytes by ``hvd.allreduce`` of a numpy array ("numpy").
It prints the least and the median time of the slowest rank. "callback" is distributed less alone
and numpy: the copies of the gradients into one array and back, and the way into Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.tools.bench.measurement import timed
from tests.examples.conftest import EXAMPLES

_LEAVES = 10
_SIZES = {"4 KB": 1_000, "10 MB": 2_500_000}
_ROUNDS = 300


def main() -> None:
    """Print a line for each size."""
    # Read when JAX is imported: each rank computes with one thread.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    sys.path.insert(0, str(EXAMPLES))
    hvd.init()
    for title, size in _SIZES.items():
        contenders = _contenders(size)
        seconds = np.empty((_ROUNDS + 10, len(contenders)))
        for row in seconds:
            for index, run in enumerate(contenders.values()):
                hvd.barrier()
                row[index] = timed(run)
        seconds = hvd.allreduce(seconds[10:], op=hvd.Max)
        found = np.stack([seconds.min(axis=0), np.median(seconds, axis=0)], axis=1) * 1e6
        rows = dict(zip(contenders, found, strict=True))
        rows["callback"] = rows["distributed"] - rows["alone"] - rows["numpy"]
        for name, (least, median) in rows.items():
            text = f"{title:>6} {name:<12} least {least:6.0f} us, median {median:6.0f} us"
            hvd.on_rank_zero(print)(text, flush=True)


def _contenders(size: int) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    import optax
    from jax_optax import distributed

    leaves = [jnp.full(size // _LEAVES, 1.0 + hvd.rank()) for _ in range(_LEAVES)]
    array = np.ones(size, np.float32)

    def stepping(optimizer: Any) -> Callable[[], Any]:
        state = optimizer.init(leaves)
        update = jax.jit(lambda gradients: optimizer.update(gradients, state)[0])
        return lambda: jax.block_until_ready(update(leaves))

    optimizer = distributed(optax.sgd(1.0))
    averages, _ = jax.jit(optimizer.update)(leaves, optimizer.init(leaves))
    assert np.allclose(averages, -(hvd.size() + 1) / 2)
    return {
        "alone": stepping(optax.sgd(0.1)),
        "distributed": stepping(distributed(optax.sgd(0.1))),
        "numpy": lambda: hvd.allreduce(array, name="array"),
    }


if __name__ == "__main__":
    main()
