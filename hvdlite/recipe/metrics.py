"""Metrics of all ranks, whose shards may differ in size: averages, sums, gathered values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdlite import collectives
from hvdlite.base.arrays import as_array, describe
from hvdlite.errors import HorovodInternalError, MismatchError

_Result = TypeVar("_Result")


class _Layout(NamedTuple):
    samples: int
    rows: tuple[tuple[Any, tuple[int, ...]], ...]  # dtype and shape of each array's rows
    has_places: bool

    def __str__(self) -> str:
        shown = self.rows[:-1] if self.has_places else self.rows
        rows = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in shown)
        return f"rows of {rows} {'with' if self.has_places else 'without'} indices"


def average_metrics(metrics: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
    """Average metrics over all ranks, each rank weighted by its number of samples.

    Collective: every rank calls it and gets the same floats. It takes one exchange, so that an
    error on one rank is an error on all.

    Args:
        metrics: Names and scalars (floats, integers, numpy scalars, 0-dimensional arrays).
            The same names on all ranks, in any order.
        weight: The number of samples behind this rank's values. Values of weight 0, even NaN,
            do not count.

    Returns:
        The averages, in the order of ``metrics``.

    Raises:
        ValueError: A rank's weight is negative or not finite, a value is not a scalar, or all
            weights are 0.
        MismatchError: The ranks have different names.
    """
    entries = _entries("average_metrics", metrics, weight)
    total = sum(share for _, share in entries)
    if not total:
        raise ValueError(
            f"the weights of all {len(entries)} ranks are 0: pass the number of samples of each "
            "rank as weight"
        )
    return {
        key: sum(share * values[key] for values, share in entries if share > 0) / total
        for key in metrics
    }


def sum_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add up metrics over all ranks, such as the numbers of samples and of hits.

    Collective, in one exchange, with the errors of `average_metrics`. A rank without samples gives
    zeros.

    Example::

        total = hvd.sum_metrics({"correct": correct, "count": count})
        accuracy = total["correct"] / total["count"]

    Args:
        metrics: As for `average_metrics`.

    Returns:
        The sums, in the order of ``metrics``, as floats.
    """
    entries = _entries("sum_metrics", metrics)
    return {key: math.fsum(values[key] for values, _ in entries) for key in metrics}


def gather(values: Any, indices: Any = None) -> Any:
    """Return the values of all ranks' samples, in the order of the data set.

    For metrics that need all predictions at once, such as a median or the area under a curve.
    Collective; ranks may have different numbers of samples, also none.

    Example::

        sharding = hvd.Sharding(len(images), 256, shuffle=False, allow_empty=True)
        indices = np.concatenate(sharding.indices(0))
        predictions = hvd.gather(model(images[indices]), indices)

    Args:
        values: An array or a tensor (first axis: samples), a list of such batches, or a tuple of
            these, for example predictions and labels. A rank without samples may give ``[]``.
        indices: The place of each of them in the data set: integers, or a list of arrays of
            integers as `Sharding.indices` returns it. None: rank by rank.

    Returns:
        An array, the same on all ranks; a tuple of arrays for a tuple. A place that came twice, as
        the padding of a sampler, is there once. PyTorch's bfloat16 becomes float32.

    Raises:
        ValueError: On all ranks: a rank's values and indices differ in number, or cannot be sent.
        HorovodInternalError: On all ranks: their values differ in dtype, shape or number, or some
            have indices and others have none.
    """
    several = isinstance(values, tuple)
    arrays: list[Any] = []

    def describe() -> _Layout:
        arrays.extend(_arrays_of(values if several else (values,), indices))
        rows = tuple((array.dtype, array.shape[1:]) for array in arrays)
        return _Layout(len(arrays[0]), rows, indices is not None)

    layouts = _of_all(describe, "gather", "values cannot be gathered")
    # A rank without samples knows neither the dtype nor the shape of a row.
    known = {str(each): (rank, each) for rank, each in enumerate(layouts) if each.samples}
    if len(known) > 1:
        found = "; ".join(f"rank {rank} has {text}" for text, (rank, _) in known.items())
        raise HorovodInternalError(f"ranks gather different values: {found}; give the same on all")
    _, layout = next(iter(known.values()), (0, layouts[0]))
    if not len(arrays[0]):
        arrays = [np.empty((0, *shape), dtype) for dtype, shape in layout.rows]
    gathered = collectives.grouped_allgather(arrays, name="gather")  # those of the same ranks
    if layout.has_places:
        _, order = np.unique(gathered.pop(), return_index=True)
        gathered = [array[order] for array in gathered]
    return tuple(gathered) if several else gathered[0]


def _of_all(make: Callable[[], _Result], name: str, failure: str) -> list[_Result]:
    """Return what all ranks have made; if one of them has failed, raise on all of them."""
    made = problem = None
    try:
        made = make()
    except Exception as error:  # the other ranks wait
        problem = str(error) or type(error).__name__
    found = collectives.allgather_object((made, problem), name=name)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(found) if problem]
    if problems:
        raise ValueError(f"{failure}: {'; '.join(problems)}")
    return [each for each, _ in found]


def _arrays_of(values: tuple[Any, ...], indices: Any) -> list[Any]:
    """Return this rank's arrays, the indices last."""
    arrays = [_joined(value) for value in values]
    if indices is not None:
        places = _joined(indices)
        if places.size and (places.dtype.kind not in "iu" or places.ndim != 1):
            raise ValueError(f"indices are {describe(places)}, expected integers[n]")
        arrays.append(places.astype(np.int64))
    counts = [len(array) for array in arrays]
    if len(set(counts)) > 1:
        last = ", the last of them indices" if indices is not None else ""
        raise ValueError(f"found {counts} rows{last}, expected as many in each array")
    return arrays


def _joined(value: Any) -> Any:
    """Return an array on the host, of a tensor or of a list of batches."""
    if not isinstance(value, list):
        array = _on_host(value)
        if not array.ndim:
            raise ValueError(f"found {value!r}, expected an array whose first axis are samples")
        return array
    parts = [*map(_on_host, value)]
    if not parts or not parts[0].ndim:  # no batches, or a list of numbers
        return np.array(parts)
    return np.concatenate(parts)


def _on_host(value: Any) -> Any:
    if not hasattr(value, "detach"):
        return as_array(value)
    tensor = value.detach().cpu().resolve_conj().resolve_neg()  # PyTorch's
    try:
        return as_array(tensor)
    except TypeError:  # numpy lacks bfloat16
        return as_array(tensor.float())


def _entries(
    name: str, metrics: Mapping[str, float], weight: float = 1.0
) -> list[tuple[dict[str, float], float]]:
    def make() -> tuple[dict[str, float], float]:
        values = {key: _scalar(f"metric {key!r}", value) for key, value in metrics.items()}
        share = _scalar("weight", weight)
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"weight={share!r} is not a number of samples: expected 0 or more")
        return values, share

    entries = _of_all(make, name, "metrics cannot be combined")
    names = set().union(*(values for values, _ in entries))
    missing = {
        key: ranks
        for key in sorted(names, key=str)
        if (ranks := [rank for rank, (values, _) in enumerate(entries) if key not in values])
    }
    if missing:
        found = "; ".join(f"{key!r} is missing on ranks {ranks}" for key, ranks in missing.items())
        raise MismatchError(
            f"ranks have different metrics: {found}. Pass the same names on all ranks, "
            "with weight 0 where a rank has no samples"
        )
    return entries


def _scalar(name: str, value: Any) -> float:
    shape = tuple(getattr(value, "shape", ()))
    found = type(value).__name__ + (f" of shape {shape}" if shape else "")
    # float() would parse a string, and only warn when it drops an imaginary part.
    is_complex = getattr(getattr(value, "dtype", None), "kind", "") == "c"
    if isinstance(value, (str, bytes)) or is_complex or shape:
        raise ValueError(f"{name} is a {found}, expected a real scalar")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is a {found}, expected a real scalar ({error})") from error
