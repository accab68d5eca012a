"""Hints on settings, from the figures of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

# Shares of the time, from 0 to 1, above which a loss is worth a hint.
_WAITING = 0.05
_EXCHANGE = 0.10
_COMPRESSED = 0.9  # of the uncompressed bytes; less was compressed
_MANY_SMALL = 20  # operations in a step


def advise(figures: Mapping[str, Any]) -> list[str]:
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
    if not hints and figures["origin"] == "hvdlite":
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
    """Return a part's share of the time of all ranks; 0 if the trace does not tell it."""
    known: float = sum(share[part] or 0.0 for share in figures["shares"])
    return known / (sum(share["seconds"] for share in figures["shares"]) or 1.0)
