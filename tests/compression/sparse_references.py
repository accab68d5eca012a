"""References for sparse strategies, in numpy float64 and by plain sorts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.compression import Bucket, Parameter, Reduction
from tests.references import dtype_of
from tests.simulation import Simulation, on_all_ranks

SHAPES = {"a": (7, 9), "b": (), "c": (131,), "d": (0, 3), "e": (1,), "f": (5, 5, 5)}
DTYPES = ["float32", "float64", "float16", "bfloat16"]

Selection = Callable[[Any], Any]


def largest(values: Any, count: int) -> Any:
    """Return the indices of the greatest magnitudes, by a stable sort."""
    order = np.argsort(-np.abs(values.astype(np.float64)), kind="stable")
    return np.sort(order[:count])


def keep(values: Any, indices: Any) -> Any:
    """Return the values at some indices, and zeros elsewhere."""
    kept = np.zeros_like(values)
    kept[indices] = values[indices]
    return kept


def joined(gradients: Mapping[str, Any]) -> Any:
    """Return all of a rank's gradients, flat, in float64."""
    return np.concatenate([np.ravel(each).astype(np.float64) for each in gradients.values()])


def check_result(found: Mapping[str, Any], sent: Sequence[Any], divisor: int, dtype: str) -> None:
    """Assert that results are the sum of what the ranks have sent, divided, to rounding."""
    for each in found.values():
        assert each.dtype == dtype_of(dtype)
    total = sum(sent) / divisor
    magnitude = sum(map(np.abs, sent)) / divisor
    result = joined(found)
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    bound = 2.0**-bits * np.abs(total) + 8 * 2.0 ** -max(23, bits) * magnitude + 1e-7 * (bits == 10)
    assert (np.abs(result - total) <= bound).all()
    np.testing.assert_array_equal(result[magnitude == 0], 0)


class Buckets:
    """One bucket of each rank, of two parameters, "first" and "second", for a single exchange.

    Args:
        rows: of each rank, flat, of one dtype; the last element is the second parameter.
        reduction: of them.
    """

    def __init__(self, rows: Sequence[Any], reduction: Reduction | None = None) -> None:
        self.simulation = Simulation(len(rows))
        self.buckets = []
        for row in rows:
            values = np.asarray(row)
            parameters = [
                Parameter("first", (values.size - 1,), values.dtype),
                Parameter("second", (), values.dtype),
            ]
            bucket = Bucket(parameters, reduction or Reduction())
            bucket.send[...] = values
            bucket.unsent = np.full_like(values, np.nan)
            self.buckets.append(bucket)

    def exchange(self, strategy: Any) -> Any:
        """Return the result, which is equal on all ranks."""

        def on_rank(rank: int) -> None:
            with np.errstate(all="ignore"):
                strategy.exchange(self.buckets[rank], self.simulation.transports[rank])

        on_all_ranks(on_rank, range(len(self.buckets)))
        assert len({bucket.result.tobytes() for bucket in self.buckets}) == 1
        return self.buckets[0].result

    def errors(self, strategy: Any) -> list[BaseException]:
        """Return the error of each rank."""

        def on_rank(rank: int) -> BaseException | None:
            try:
                with np.errstate(all="ignore"):
                    strategy.exchange(self.buckets[rank], self.simulation.transports[rank])
            except Exception as error:
                return error
            return None

        return on_all_ranks(on_rank, range(len(self.buckets)))

    def count_bytes(self, strategy: Any) -> list[int]:
        """Return the bytes of each rank's message to each other one."""
        lengths = [0] * len(self.buckets)
        for rank, transport in enumerate(self.simulation.transports):
            allgather = transport.allgather

            def counting(piece, result, rank=rank, allgather=allgather):
                lengths[rank] += piece.nbytes
                allgather(piece, result)

            transport.allgather = counting  # type: ignore[method-assign]
        self.exchange(strategy)
        return lengths
