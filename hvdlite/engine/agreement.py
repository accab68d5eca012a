"""Agreement: decide from all ranks' data, with the same outcome on each, what happens next."""

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
    key: str = ""  # of the operation; empty: its name
    stands_in: bool = False  # whether ranks that have joined can take part in it
    stall_exempt: bool = False  # whether it may wait without limit
    title: str = ""  # for messages; empty: its name


@dataclass(frozen=True)
class Pending:
    """The pending operations of one rank, oldest first."""

    descriptions: tuple[Description, ...]
    closing: bool = False
    joined: bool = False  # whether the rank has no more data of its own


@dataclass
class Decision:
    """The next steps of all ranks; operations are given by their keys.

    Attributes:
        ready: Operations that every rank has submitted with one signature, in the order to run
            them; also those in which the ranks that lack them stand in, because they have joined.
        substituted: The latter ones.
        differing: Operations that every rank has submitted, with different signatures.
        clashing: For each name under which every rank waits for an operation, but not all
            for one kind: the operation of each member.
        failed: For each operation that cannot run, the reason.
        missing: For each one that waits, by its title, the members that have not submitted it.
        closing: The members that are shutting down.
    """

    ready: list[str] = field(default_factory=list)
    substituted: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    clashing: list[dict[int, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    closing: list[int] = field(default_factory=list)


def decide(pending: Mapping[int, Pending], give_up_after: float = math.inf) -> Decision:
    """Sort the operations of all ranks into what can run, what cannot, and what waits.

    Args:
        pending: By member, ascending; every rank passes the same.
        give_up_after: Seconds after which an operation that is still missing somewhere
            fails where it was submitted, and with it any that has waited half as long: of two
            ranks that wait for each other, the first to go on would leave the other one waiting.
    """
    tables = {
        rank: {entry.key or entry.name: entry for entry in each.descriptions}
        for rank, each in pending.items()
    }
    decision = Decision(closing=[rank for rank, each in pending.items() if each.closing])
    joined = {rank for rank, each in pending.items() if each.joined}
    waiting: dict[str, list[int]] = {}
    if _longest_wait(tables, joined) > give_up_after:
        give_up_after /= 2
    # dict.fromkeys: the union of the keys, in an order that is the same on all ranks.
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        entries = {rank: table[key] for rank, table in tables.items() if key in table}
        missing = [rank for rank in tables if rank not in entries]
        # A join itself waits for ranks that have not joined; no other operation waits for ranks
        # that have.
        substituted = bool(missing) and joined.issuperset(missing)
        why = _failure(entries, missing, decision.closing, give_up_after, substituted)
        if why is not None:
            decision.failed[key] = why
        elif missing and not substituted:
            waiting[key] = missing
        elif len({entry.digest for entry in entries.values()}) > 1:
            decision.differing.append(key)
        else:
            decision.ready.append(key)
            if substituted:
                decision.substituted.append(key)
    _sort_waiting(decision, tables, waiting)
    return decision


def _longest_wait(tables: Mapping[int, Mapping[str, Description]], joined: set[int]) -> float:
    """Return how long an operation has waited for ranks that may still submit it."""
    awaited = [table for rank, table in tables.items() if rank not in joined]
    return max(
        (
            entry.waited
            for table in tables.values()
            for key, entry in table.items()
            if not entry.stall_exempt and any(key not in other for other in awaited)
        ),
        default=0.0,
    )


def _failure(
    entries: Mapping[int, Description],
    missing: Sequence[int],
    closing: Sequence[int],
    give_up_after: float,
    substituted: bool,
) -> str | None:
    """Return why an operation can run neither now nor later; None: it can."""
    name = _title(next(iter(entries.values())))
    failures = {rank: entry.failure for rank, entry in entries.items() if entry.failure is not None}
    if substituted:
        if not all(entry.stands_in for entry in entries.values()):
            return (
                f"{name} cannot go on without {ranks_text(missing)}, which called join() and can "
                "take part in allreduces only; call it before join() on all ranks, or after"
            )
        missing = ()
    gone = [rank for rank in missing if rank in closing]
    if gone:
        return (
            f"{ranks_text(gone)} shut down without submitting {name}; "
            "see what ended there, and run the same steps on all ranks"
        )
    if missing:
        waited = max(entry.waited for entry in entries.values())
        if waited <= give_up_after or any(entry.stall_exempt for entry in entries.values()):
            return None
        return (
            f"{name} has waited {waited:.0f} s and is still missing on {ranks_text(missing)}; "
            "run the same steps on all ranks, or raise HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
        )
    return "; ".join(f"rank {rank}: {why}" for rank, why in failures.items()) or None


def _sort_waiting(
    decision: Decision,
    tables: Mapping[int, Mapping[str, Description]],
    waiting: Mapping[str, list[int]],
) -> None:
    """Separate operations that wait for each other under one name from those that just wait.

    Ranks that submit the kinds of a name in the same order never clash: the first of two
    kinds is on its way, or done, on all ranks before any rank can wait for the second alone.
    """
    by_name: dict[str, dict[int, str]] = {}
    for rank, table in tables.items():
        for key, entry in table.items():
            if key in waiting:
                by_name.setdefault(entry.name, {}).setdefault(rank, key)
    for keys in by_name.values():
        if len(keys) == len(tables):
            decision.clashing.append(keys)
        elif not any(tables[rank][key].stall_exempt for rank, key in keys.items()):
            for key in dict.fromkeys(keys.values()):
                title = _title(next(table[key] for table in tables.values() if key in table))
                label = repr(key) if title in decision.missing else title
                decision.missing[label] = waiting[key]


def _title(entry: Description) -> str:
    return entry.title or repr(entry.name)


def explain(name: str, signatures: Mapping[int, Signature]) -> str:
    """Describe the first difference between the ranks' submissions under one name.

    Args:
        name: Name of the operation.
        signatures: By rank.
    """
    what, found = find_difference(signatures)
    return (
        f"the ranks disagree on {name!r}: {what} is {found}; "
        "every rank must submit the same operation under one name"
    )


def find_difference(signatures: Mapping[int, Signature]) -> tuple[str, str]:
    """Return the label of the first entry that differs, and which ranks have which value.

    Args:
        signatures: By rank; they differ.
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
    return what, found


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def report_missing(missing: Mapping[str, Sequence[int]], limit: int = 8) -> str:
    """Return one line on which operations, by their titles, wait for which ranks."""
    entries = [f"{title} (missing on {ranks_text(ranks)})" for title, ranks in missing.items()]
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entries[:limit]) + more
