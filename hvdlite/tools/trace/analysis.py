"""The analysis of a trace: shares of time, the slowest rank, the worst tensors, and what to do.

The time of a rank is divided into three parts that add up to the whole:

- *exchange*: a thread is blocked (SYNCHRONIZE) while an operation runs;
- *waiting*: a thread is blocked while no operation runs, because other ranks have not come yet, or
  because the ranks are agreeing on the next operation;
- *compute*: all the rest, such as the model, the input pipeline and the optimizer. Exchanges that
  run meanwhile are *hidden*.

The operations of a rank are matched with those of the others by the tensor and the number of its
operations before. For each, the rank that waited least is the last; the others waited for it, by as
much as they waited longer. These are durations of each rank's own clock, so that clocks of nodes
that differ do no harm.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from hvdlite.errors import StartError
from hvdlite.tools.trace.record import Operations, RankRecord, Record

_MICRO = 1e-6
_MOST_TENSORS = 20
_SMALL = 2**16  # bytes
# Shares of the time, from 0 to 1, above which a loss is worth a hint.
_WAITING = 0.05
_EXCHANGE = 0.10
_COMPRESSED = 0.9  # of the uncompressed bytes; less was compressed
_MANY_SMALL = 20  # operations in a step


def read(path: str) -> tuple[dict[str, Any], Record]:
    """Analyse a timeline, which is a file.

    Returns:
        The figures, which the guide to the timeline explains ("For programs"), and the record
        behind them.

    Raises:
        StartError: the file cannot be read, or no operation is in it.
    """
    record = Record(path)
    record.read()
    if not record.tensors:
        ended = "before the first operation" if record.problem else "without any operation"
        raise StartError(
            f"{path} ends {ended} of hvdlite after {record.events} events; record at least one step"
        )
    ranks = list(record.ranks.values())
    marker = _find_steps(record, ranks)
    counts = {rank: len(each.ends) for rank, each in record.ranks.items()}
    count, most = min(counts.values()), max(counts.values())
    if 1 < count < most - 1 and not record.problem:
        rank = min(counts, key=counts.__getitem__)
        record.problem = (
            f"{path} has {count} steps of rank {rank}, and {most} of another (did a rank die, or "
            f"come in later?): what follows counts the first {count} of each"
        )
    if count > 1:
        for each in ranks:
            each.first, each.last = int(each.ends[0]), int(each.ends[count - 1])
    waits = _Waits(ranks)
    document = {
        "file": record.path,
        "events": record.events,
        "problem": record.problem,
        "steps": _describe(count, marker, ranks[0], record),
        "shares": [_share(rank, each) for rank, each in record.ranks.items()],
        "slowest": waits.slowest(list(record.ranks), count - 1),
        "waited_for": (waits.matrix * _MICRO).tolist(),
        "sent_ratio": _sent_ratio(record, len(ranks)),
        "tensors": _tensors(record, waits),
    }
    return document, record


class _Waits:
    """How long each rank waited for the last one, at each operation that all ranks have.

    Attributes:
        matrix: microseconds that rank i was blocked until rank j came.
        late: microseconds between the first rank's arrival and the last one's.
    """

    def __init__(self, ranks: Sequence[RankRecord]) -> None:
        size = len(ranks)
        matched = _match([each.inside[each.inside.ready >= 0] for each in ranks])
        waited = np.array([own.start - own.ready for own in matched], np.int64)
        self.last = waited.argmin(axis=0)
        excess = waited - waited.min(axis=0)
        self.late = excess.max(axis=0)
        self.tensor = matched[0].tensor
        self.matrix = np.zeros((size, size))
        for rank, (own, record) in enumerate(zip(matched, ranks, strict=True)):
            until = record.blocked_until
            blocked = until(own.ready + excess[rank]) - until(own.ready)
            self.matrix[rank] = np.bincount(self.last, blocked, size)

    def slowest(self, ranks: Sequence[int], steps: int) -> dict[str, Any] | None:
        """Return the rank that the others waited for most."""
        if len(ranks) < 2 or not self.matrix.any():
            return None
        caused = self.matrix.sum(axis=0) / (len(ranks) - 1) * _MICRO
        worst = int(caused.argmax())
        return {
            "rank": ranks[worst],
            "last": float((self.last == worst).mean()),
            "blame": float(self.matrix[:, worst].sum() / self.matrix.sum()),
            "waited": float(caused[worst]),
            "waited_per_step": float(caused[worst]) / steps if steps > 0 else None,
        }


def _match(operations: Sequence[Operations]) -> list[Operations]:
    """Return the operations that all ranks have, in one order."""
    keys = [own.tensor << 32 | own.occurrence for own in operations]
    common = functools.reduce(np.intersect1d, keys)
    matched = []
    for own, key in zip(operations, keys, strict=True):
        order = np.argsort(key)
        matched.append(own[order[np.searchsorted(key[order], common)]])
    return matched


def _find_steps(record: Record, ranks: Sequence[RankRecord]) -> str:
    """Note the ends of the steps of each rank; return the event that marks them."""
    lengths = {name: len(ends) for name, ends in ranks[0].steps.items()}
    if lengths:
        name = max(lengths, key=lambda name: lengths[name])
        for each in ranks:
            each.ends = each.steps.get(name, ())
        return f"exchanges of {name}"
    counts = np.bincount(ranks[0].operations.tensor, minlength=len(record.tensors))
    for number, (row, name) in enumerate(record.tensors):
        if name.endswith(".noname.*"):  # there may be any number in a step
            counts[number] = 0
        elif row.startswith("gradients"):  # if there are any: named tensors may be metrics
            counts[number] *= 2**20
    most = int(counts.argmax())
    if not counts[most]:
        return ""
    for each in ranks:
        each.ends = each.operations.end[each.operations.tensor == most]
    return f"operations of {[*record.tensors][most][1]}"


def _describe(count: int, marker: str, first: RankRecord, record: Record) -> dict[str, Any]:
    is_known = count > 1
    times = np.diff(np.asarray(first.ends[:count])) * _MICRO if is_known else np.zeros(1)
    nbytes = np.array([nbytes for _, nbytes, _ in record.tensors.values()])
    small = nbytes[first.inside.tensor] < _SMALL
    return {
        "count": count,
        "marker": marker,
        "seconds_mean": float(times.mean()),
        "seconds_median": float(np.median(times)),
        "seconds_max": float(times.max()),
        "operations": len(small) / (count - 1) if is_known else 0.0,
        "small": float(small.sum()) / (count - 1) if is_known else 0.0,
    }


def _sent_ratio(record: Record, size: int) -> float | None:
    known = [sizes for _, *sizes in record.tensors.values() if all(sizes)]
    if size < 2 or not known:
        return None
    nbytes, sent = map(sum, zip(*known, strict=True))
    return sent / (nbytes * 2 * (size - 1) / size)


def _share(rank: int, record: RankRecord) -> dict[str, Any]:
    blocked_until = record.blocked_until
    starts, ends = (np.clip(each, record.first, record.last) for each in record.busy)
    seconds, blocked, busy, both = (
        float(value) * _MICRO
        for value in (
            record.last - record.first,
            blocked_until(record.last) - blocked_until(record.first),
            (ends - starts).sum(),
            (blocked_until(ends) - blocked_until(starts)).sum(),
        )
    )
    parts = {
        "compute": seconds - blocked,
        "exchange": both,
        "waiting": blocked - both,
        "hidden": busy - both,
    }
    return {"rank": rank, "name": record.name or f"rank {rank}", "seconds": seconds, **parts}


def _tensors(record: Record, waits: _Waits) -> list[dict[str, Any]]:
    ranks, operations = list(record.ranks), [each.inside for each in record.ranks.values()]
    numbers = np.concatenate([own.tensor for own in operations])
    times = np.concatenate([own.end - own.start for own in operations])
    tensors = list(record.tensors.items())
    total = np.bincount(numbers, times, len(tensors)) * _MICRO
    late = np.bincount(waits.tensor, waits.late, len(tensors)) * _MICRO
    worst = [*np.argsort(-total)[: _MOST_TENSORS // 2], *np.argsort(-late)[: _MOST_TENSORS // 2]]
    found = []
    for n in sorted({*worst} & {*numbers}, key=lambda n: -total[n]):
        (row, name), (_, nbytes, sent) = tensors[n]
        own, matched = times[numbers == n], waits.tensor == n
        count = max(int(matched.sum()), 1)
        lasts = np.bincount(waits.last[matched], minlength=1)
        tensor = {
            "name": name,
            "row": row,
            "count": int((operations[0].tensor == n).sum()),
            "nbytes": nbytes,
            "sent": sent,
            "exchange": float(total[n] / len(own)),
            "exchange_max": float(own.max() * _MICRO),
            "exchange_share": float(total[n] / total.sum()) if total.any() else 0.0,
            "late": float(late[n] / count),
            "last_rank": ranks[lasts.argmax()] if len(ranks) > 1 and lasts.any() else None,
            "last": float(lasts.max() / count) if len(ranks) > 1 else 0.0,
        }
        found.append(tensor)
    return found


# Hints on settings


def hints_of(figures: Mapping[str, Any]) -> list[str]:
    """Return what to do, the largest gain first; a sentence or two for each."""
    hints: list[tuple[float, str]] = []

    def hint(gain: float, text: str) -> None:
        hints.append((gain, text))

    exchange, waiting = mean_share(figures, "exchange"), mean_share(figures, "waiting")
    slowest, steps = figures["slowest"], figures["steps"]
    seconds = fmean(share["seconds"] for share in figures["shares"])
    # Of ranks that take turns at being last, each has a share of 1/n.
    fair = 1 / len(figures["shares"])
    if slowest and slowest["waited"] > _WAITING * seconds and slowest["blame"] > (1 + fair) / 2:
        part, per_step = slowest["waited"] / seconds, slowest["waited_per_step"]
        each = "" if per_step is None else f"{1e3 * per_step:.3g} ms per step, "
        hint(
            part,
            f"The others wait for rank {slowest['rank']} ({each}{part:.0%} of their "
            "time): compare its input pipeline, the load of its host and its share of the samples "
            "with theirs.",
        )
    elif waiting > _WAITING:
        hint(
            waiting,
            f"Waiting takes {waiting:.0%}, and no single rank causes it: steps vary in length. "
            "Give each rank cores of its own (OMP_NUM_THREADS = cores / ranks) and batches of "
            "equal size; larger batches even out.",
        )
    if exchange > _EXCHANGE:
        hint(
            exchange,
            f"Exchange takes {exchange:.0%}: {_on_bytes(figures)}exchange less often (larger "
            "batches, backward_passes_per_step). With cores to spare, HVDLITE_OVERLAP=1 hides "
            "it behind the backward pass.",
        )
    if steps["small"] > _MANY_SMALL:
        hint(
            0.0,
            f"There are {steps['small']:.0f} operations of less than 64 KiB in a step: combine "
            "them by hvd.grouped_allreduce, and metrics by one hvd.average_metrics.",
        )
    if not hints:
        hint(0.0, f"Exchange and waiting take {exchange + waiting:.1%}: settings can gain little.")
    if steps["count"] < 2:
        hint(
            0.0,
            "The trace tells no steps, so the shares include the start of the program; record "
            "ten steps or more.",
        )
    return [text for _, text in sorted(hints, key=lambda each: -each[0])]


def _on_bytes(figures: Mapping[str, Any]) -> str:
    """Return what to do about the bytes; empty: nothing."""
    is_one_host = len({share["name"].rpartition(" on ")[2] for share in figures["shares"]}) == 1
    ratio = 1.0 if figures["sent_ratio"] is None else figures["sent_ratio"]
    if ratio < _COMPRESSED:
        if not is_one_host:
            return f"compression sends {ratio:.2g} of the bytes already; "
        return (
            f"compression sends {ratio:.2g} of the bytes, but within one host it takes longer than "
            "it saves: leave it out, or "
        )
    if is_one_host:  # where nothing is sent, and every strategy takes longer than it saves
        return ""
    return (
        "send fewer bytes (compression=; `hvdlite bench compression` compares the strategies), or "
    )


def mean_share(figures: Mapping[str, Any], part: str) -> float:
    """Return a part's share of the time of all ranks."""
    known: float = sum(share[part] for share in figures["shares"])
    return known / (sum(share["seconds"] for share in figures["shares"]) or 1.0)
