"""What to do when the ranks' next operations differ: every rank decides it from the same data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdlite.engine.operation import Signature


@dataclass(frozen=True)
class Description:
    """An operation as the other ranks see it."""

    name: str
    digest: bytes
    payload: bytes
    failure: str | None = None
    waited: float = 0.0  # seconds since it was submitted


@dataclass(frozen=True)
class Report:
    """What one rank brings to a round: its operations, oldest first."""

    descriptions: tuple[Description, ...]
    closing: bool = False


@dataclass
class Decision:
    """What all ranks do next.

    Attributes:
        ready: names that every rank has submitted alike, in the order to run them.
        differing: names that every rank has submitted, with different signatures.
        failed: for each name that cannot run, why.
        missing: for each name that waits, the ranks that have not submitted it.
        closing: the ranks that are shutting down.
    """

    ready: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    closing: list[int] = field(default_factory=list)


def decide(reports: Sequence[Report], give_up_after: float = math.inf) -> Decision:
    """Sort the operations of all ranks into what can run, what cannot, and what waits.

    Args:
        reports: by rank; every rank passes the same.
        give_up_after: seconds after which an operation that is still missing somewhere
            fails where it was submitted.
    """
    tables = [{entry.name: entry for entry in report.descriptions} for report in reports]
    decision = Decision(closing=[rank for rank, report in enumerate(reports) if report.closing])
    # dict.fromkeys: the union of the names, in an order that is the same on all ranks.
    for name in dict.fromkeys(name for table in tables for name in table):
        missing = [rank for rank, table in enumerate(tables) if name not in table]
        failures = [
            (rank, table[name].failure)
            for rank, table in enumerate(tables)
            if name in table and table[name].failure is not None
        ]
        gone = [rank for rank in missing if rank in decision.closing]
        if gone:
            decision.failed[name] = (
                f"{ranks_text(gone)} shut down without submitting {name!r}; "
                "see what ended there, and run the same steps on all ranks"
            )
        elif missing:
            waited = max(table[name].waited for table in tables if name in table)
            if waited > give_up_after:
                decision.failed[name] = (
                    f"{name!r} has waited {waited:.0f} s and is still missing on "
                    f"{ranks_text(missing)}"
                )
            else:
                decision.missing[name] = missing
        elif failures:
            decision.failed[name] = "; ".join(f"rank {rank}: {why}" for rank, why in failures)
        elif len({table[name].digest for table in tables}) > 1:
            decision.differing.append(name)
        else:
            decision.ready.append(name)
    return decision


def explain(name: str, signatures: Mapping[int, Signature]) -> str:
    """Say in what the ranks' submissions under one name differ first.

    Args:
        name: what the operation is called.
        signatures: by rank.
    """
    reference_rank = min(signatures)
    for position in range(max(len(signature) for signature in signatures.values())):
        fields = {
            rank: signature[position] if position < len(signature) else ("nothing more", "")
            for rank, signature in signatures.items()
        }
        if len(set(map(repr, fields.values()))) > 1:
            break
    groups: dict[str, list[int]] = {}
    labels = {label for label, _ in fields.values()}
    for rank, (label, value) in fields.items():
        text = str(value) if len(labels) == 1 else f"{label} {value}".strip()
        groups.setdefault(text, []).append(rank)
    what = fields[reference_rank][0] if len(labels) == 1 else "it"
    found = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in groups.items())
    return (
        f"the ranks disagree on {name!r}: {what} is {found}; "
        "every rank must submit the same operation under one name"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def report_missing(missing: Mapping[str, Sequence[int]], limit: int = 8) -> str:
    """One line on what waits for whom."""
    entries = [f"{name!r} (missing on {ranks_text(ranks)})" for name, ranks in missing.items()]
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entries[:limit]) + more
