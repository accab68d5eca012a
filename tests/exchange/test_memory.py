"""How much temporary memory an exchange takes, beside what is remembered."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hvdlite.exchange import Bucket, Parameter, Reduction, exchange_bucket
from hvdlite.transport import Loopback
from tests.exchange.strategies import STRATEGIES


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_no_more_than_two_buckets(strategy):
    """On a single rank, which adds up all of it; others share that work."""
    parameters = [Parameter(name, (1024, 1024), np.dtype(np.float32)) for name in ("a", "b")]
    bucket = Bucket(parameters, Reduction())
    np.random.default_rng(0).standard_normal(out=bucket.send, dtype=np.float32)
    exchange_bucket(strategy, bucket, Loopback())  # after it, there is what it remembers
    bucket.count += 1
    tracemalloc.start()
    try:
        exchange_bucket(strategy, bucket, Loopback())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * bucket.send.nbytes
