"""Agreement: decide which operations run next where the ranks' queues differ.

It is used only where the digests of a round differ (``rounds.py``). `decide` gets the same data on
every rank, all ranks' descriptions of what they have pending, so the outcome is the same on each.
If every rank that lacks an operation has joined, it runs, and zeros stand in for their data
(``collectives/join.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from hvdlite.engine.calls import CallReport, Place, where_they_part
from hvdlite.engine.operation import Signature
from hvdlite.errors import by_value, ranks_text

#: The likely causes where ranks wait for others that do something else.
LIKELY = (
    "do all ranks run the same steps? A rank may end its loop early (fewer batches, early stopping "
    "by its own metric), branch by a value of its own, or have a parameter that others lack: "
    "average what decides (hvd.allreduce), or use hvd.lockstep() or hvd.join()"
)
#: Where such a wait has no end.
BOUND = "; HVDLITE_STALL_SHUTDOWN_TIME_SECONDS=600 would make such a wait an error"


@dataclass(frozen=True)
class Description:
    """An operation as the other ranks see it."""

    name: str
    key: str
    title: str
    digest: bytes
    payload: bytes
    failure: str | None = None
    waited: float = 0.0  # seconds since it was submitted
    stands_in: bool = False  # whether ranks that have joined can take part in it
    stall_exempt: bool = False  # whether it may wait without limit
    place: bytes = b""  # of the call that it is of, if that has no name


@dataclass(frozen=True)
class QueueReport:
    """The pending operations of one rank, oldest first, and its other work."""

    descriptions: tuple[Description, ...]
    closing: bool = False
    joined: bool = False  # whether the rank has no more data of its own
    elsewhere: tuple[str, ...] = ()  # the titles of operations that wait in its other lanes
    waited: float = 0.0  # the seconds since the oldest of them was submitted
    last: str = ""  # the operation of this lane that has ended last; empty: none has
    steps: int = 0  # the optimizer's steps that it has made
    limit: float = math.inf  # the seconds that it lets an operation wait


@dataclass
class Decision:
    """The next steps of all ranks; operations are given by their keys.

    Attributes:
        ready: Operations that every rank has submitted with one signature, in the order to run
            them; also those in which the ranks that lack them stand in, because they have joined.
        substituted: The ready ones in which ranks stand in.
        differing: The operation of each member, where every rank has submitted one under a name,
            with different signatures or of different kinds.
        failed: For each operation that cannot run, the reason.
        crossed: Those of them that are calls without a name, made in another order on each rank.
        parted: The ready ones that were called without a name, and at different places.
        missing: For each operation that waits, by its title, the members that lack it.
        closing: The members that are shutting down.
        astray: What the members do for which others wait; empty unless it is known of each.
    """

    ready: list[str] = field(default_factory=list)
    substituted: list[str] = field(default_factory=list)
    differing: list[dict[int, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    crossed: list[str] = field(default_factory=list)
    parted: list[str] = field(default_factory=list)
    missing: dict[str, list[int]] = field(default_factory=dict)
    closing: list[int] = field(default_factory=list)
    astray: str = ""


def decide(pending: Mapping[int, QueueReport]) -> Decision:
    """Sort the operations of all ranks into what can run, what cannot, and what waits.

    After the shortest limit of any rank, an operation that is still missing somewhere fails where
    it was submitted, together with all that have waited half as long, also in other lanes: if one
    of two ranks that wait for each other went on, the other would wait forever.

    Args:
        pending: By member, ascending; every rank passes the same.
    """
    give_up_after = min(each.limit for each in pending.values())
    tables = {
        rank: {entry.key: entry for entry in each.descriptions} for rank, each in pending.items()
    }
    decision = Decision(closing=[rank for rank, each in pending.items() if each.closing])
    joined = {rank for rank, each in pending.items() if each.joined}
    waiting: dict[str, list[int]] = {}
    # dict.fromkeys: the union of the keys, in an order that is the same on all ranks.
    missing = {
        key: [rank for rank, table in tables.items() if key not in table]
        for key in dict.fromkeys(key for table in tables.values() for key in table)
    }
    # A join itself waits for ranks that have not joined; no other operation waits for ranks that
    # have.
    substituted = {key for key, ranks in missing.items() if ranks and joined.issuperset(ranks)}
    waits_here = [
        entry.waited
        for table in tables.values()
        for key, entry in table.items()
        if missing[key] and key not in substituted and not entry.stall_exempt
    ]
    if max(*waits_here, *(each.waited for each in pending.values()), 0) > give_up_after:
        give_up_after /= 2
    for key, ranks in missing.items():
        entries = {rank: table[key] for rank, table in tables.items() if key in table}
        why = _failure(entries, ranks, pending, give_up_after, key in substituted)
        if why is not None:
            decision.failed[key] = why
        elif ranks and key not in substituted:
            waiting[key] = ranks
        elif len({entry.digest for entry in entries.values()}) > 1:
            decision.differing.append(dict.fromkeys(pending, key))
        else:
            decision.ready.append(key)
            if ranks:
                decision.substituted.append(key)
            if len({entry.place for entry in entries.values()}) > 1:
                decision.parted.append(key)
    _sort_waiting(decision, tables, waiting)
    late = sorted({rank for ranks in decision.missing.values() for rank in ranks})
    waits = _waits(pending, late)
    if late and all(waits.values()):
        decision.astray = _doing(pending, late)
    return decision


def _failure(
    entries: Mapping[int, Description],
    missing: Sequence[int],
    pending: Mapping[int, QueueReport],
    give_up_after: float,
    substituted: bool,
) -> str | None:
    """Return why an operation can never run; None if it can."""
    name = next(iter(entries.values())).title
    failures = {rank: entry.failure for rank, entry in entries.items() if entry.failure is not None}
    if substituted:
        if not all(entry.stands_in for entry in entries.values()):
            return (
                f"{name} cannot go on without {ranks_text(missing)}, which called join() and can "
                "take part in allreduces only; call it before join() on all ranks, or after"
            )
        missing = ()
    gone = [rank for rank in missing if pending[rank].closing]
    if gone:
        return (
            f"{ranks_text(gone)} shut down without submitting {name}; "
            f"{_doing(pending, gone)}; see what ended there; {LIKELY}"
        )
    if missing:
        waited = max(entry.waited for entry in entries.values())
        if waited <= give_up_after or any(entry.stall_exempt for entry in entries.values()):
            return None
        return (
            f"{name} has waited {waited:.0f} s and is still missing on {ranks_text(missing)}; "
            f"{_doing(pending, missing)}; {LIKELY}, or raise HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
        )
    return "; ".join(f"rank {rank}: {why}" for rank, why in failures.items()) or None


def _waits(pending: Mapping[int, QueueReport], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Return the titles of operations for which ranks wait, in this lane and in others."""
    if not ranks:
        return {}
    common = set.intersection(*({e.key for e in each.descriptions} for each in pending.values()))
    return {
        rank: [
            *(
                entry.title
                for entry in pending[rank].descriptions
                if entry.key not in common and not entry.stall_exempt
            ),
            *pending[rank].elsewhere,
        ]
        for rank in ranks
    }


def _doing(pending: Mapping[int, QueueReport], ranks: Sequence[int]) -> str:
    """Describe what the ranks for which others wait do instead, and have done."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, waits in _waits(pending, ranks).items():
        each = pending[rank]
        if waits:
            now = f"in {waits[0]}" + (f" and {len(waits) - 1} more" if waits[1:] else "")
        else:
            now = "at its end" if each.closing else "in no operation of hvdlite"
        done = f"{each.last!r}" if each.last else ""
        done = f"{each.steps} steps" if each.steps else done
        found[now, done].append(rank)
    texts = []
    for (now, done), members in found.items():
        verb = "is" if len(members) == 1 else "are"
        texts.append(f"{ranks_text(members)} {verb} {now}" + (f", after {done}" if done else ""))
    most = max(each.steps for each in pending.values())
    if any(pending[rank].steps < most for rank in ranks):
        texts.append(f"others have made {most} steps")
    return "; ".join(texts)


def compare_calls(
    decision: Decision, reports: Mapping[int, Mapping[str, CallReport]]
) -> dict[str, dict[int, CallReport]]:
    """Find the calls without a name that are one call, although made at different places.

    Args:
        decision: gets the others as failures.
        reports: by member, and by the operation's key.

    Returns:
        The calls of the members, for each operation that is one.
    """
    found: dict[str, dict[int, CallReport]] = {}
    for key in decision.parted:
        calls = {rank: each[key] for rank, each in reports.items() if key in each}
        why = _mixing(calls) or _crossing(calls)
        if not why:
            found[key] = calls
            continue
        # The call before, too, if it has not run yet.
        before = [call.key_before for call in calls.values() if call.key_before in found]
        for each in dict.fromkeys([key, *before]):
            decision.ready.remove(each)
            if each in decision.substituted:
                decision.substituted.remove(each)
            decision.failed[each] = why
            decision.crossed.append(each)
            found.pop(each, None)
    return found


def _mixing(calls: Mapping[int, CallReport]) -> str:
    """Describe on which ranks calls of two threads are in flight at once, in random order."""
    found = [f"rank {rank}: {call.mixture}" for rank, call in calls.items() if call.mixture]
    # Some go on with the thread of the call before, others with another one.
    goes_on = {
        call.place.thread == call.before.thread
        for call in calls.values()
        if call.before is not None
    }
    if len(goes_on) > 1 and len({call.place.thread for call in calls.values()}) > 1:
        found.append(places_text({rank: call.place for rank, call in calls.items()}))
    if not found:
        return ""
    kind = next(iter(calls.values())).kind
    return (
        f"{kind} without a name: threads call it at the same time, so that the ranks may pair one "
        f"thread's call with another's ({'; '.join(found)}); give the calls names, as in "
        "name='loss', other ones in each thread, or call from one thread"
    )


def _crossing(calls: Mapping[int, CallReport]) -> str:
    """Describe which ranks call in another order: one calls next what another has called."""
    first: dict[tuple[Place, Place | None], int] = {}
    for rank, call in calls.items():
        first.setdefault((call.place, call.before), rank)
    for (one, one_before), (other, other_before) in combinations(first, 2):
        if one_before is None or other_before is None:
            continue
        if _cross(one, other, one_before, other_before):
            ranks = first[one, one_before], first[other, other_before]
            now = places_text(dict(zip(ranks, (one, other), strict=True)))
            then = places_text(dict(zip(ranks, (one_before, other_before), strict=True)))
            return (
                f"{calls[ranks[0]].kind} without a name: the calls of the ranks cross, {now}, "
                f"after {then}; their results would be mixed up. Give each call a name, as in "
                "name='loss', or make the same calls in one order on all ranks"
            )
    return ""


def _cross(one: Place, other: Place, one_before: Place, other_before: Place) -> bool:
    """Return whether one of two ranks makes a call that the other has made already."""
    # The numbers of threads may be others throughout: a rank has started one more.
    if (one, other) == (other_before, one_before) and one != other:
        return True
    # Two branches that make the same calls, on what is named alike, in another order.
    sources = one.source, other.source
    if sources == (other_before.source, one_before.source) and sources[0] != sources[1]:
        return True
    for depth in range(1, max(len(one.lines), len(other.lines)) + 1):
        here, there = one.lines[:depth], other.lines[:depth]
        here_before, there_before = one_before.lines[:depth], other_before.lines[:depth]
        differ = here != there and here_before != there_before
        if differ and (here == there_before or there == here_before):
            return True
    return False


def places_text(places: Mapping[int, Place]) -> str:
    """Return the lines of the ranks' calls that distinguish them."""
    parts = where_they_part([place.lines for place in places.values()])
    depth = parts[-1] if parts and parts[0] else 0
    shown = {rank: place.lines[depth : depth + 1] for rank, place in places.items()}
    has_columns = len({str(line) for lines in shown.values() for line in lines}) == 1 and parts
    threads = len({place.thread for place in places.values()}) > 1
    texts = {}
    for rank, place in places.items():
        text = str(place.lines[0]) if place.lines else "no line of the program"
        if depth and shown[rank]:
            text += f", called at {shown[rank][0]}"
        column = shown[rank][0].column if has_columns and shown[rank] else None
        if column is not None:
            text += f" (column {column + 1})"
        if threads:
            text += f" (thread {place.thread or 'main'})"
        texts[rank] = text
    return " and ".join(by_value(texts))


def parted_text(calls: Mapping[int, CallReport]) -> str:
    """Return the warning about a call without a name that is at different places."""
    places = places_text({rank: call.place for rank, call in calls.items()})
    kind = next(iter(calls.values())).kind
    return (
        f"{kind} without a name: the calls at {places} are taken for the same one; if they are "
        "not, their results are mixed up: give each a name, as in name='loss'"
    )


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
            decision.differing.append(keys)
        elif not any(tables[rank][key].stall_exempt for rank, key in keys.items()):
            for key in dict.fromkeys(keys.values()):
                title = next(table[key].title for table in tables.values() if key in table)
                label = repr(key) if title in decision.missing else title
                decision.missing[label] = waiting[key]


def explain(
    name: str, signatures: Mapping[int, Signature], places: Mapping[int, Place] | None = None
) -> str:
    """Describe the first difference between the ranks' submissions, by rank, under one name."""
    what, found = find_difference(signatures)
    where = f", called without a name at {places_text(places)}" if places else ""
    if all(signature.prefix for signature in signatures.values()):
        return (
            f"the ranks disagree on {name!r}{where}: {what} is {found}; "
            "every rank must submit the same operation under one name"
        )
    return (
        f"the ranks disagree on {name!r}{where}: {what} is {found}; "
        "all ranks have to train the same model, by the same optimizer and steps"
    )


def find_difference(signatures: Mapping[int, Signature]) -> tuple[str, str]:
    """Return the label of the first entry that differs, and which ranks have which value."""
    reference_rank = min(signatures)
    for position in range(max(len(signature) for signature in signatures.values())):
        fields = {
            rank: signature[position] if position < len(signature) else ("nothing more", "")
            for rank, signature in signatures.items()
        }
        if len(set(map(repr, fields.values()))) > 1:
            break
    is_one = len({label for label, _ in fields.values()}) == 1
    texts = {
        rank: str(value) if is_one else f"{label} {value}".strip()
        for rank, (label, value) in fields.items()
    }
    return fields[reference_rank][0] if is_one else "what follows", ", ".join(by_value(texts))


def report_missing(missing: Mapping[str, Sequence[int]], limit: int = 8) -> str:
    """Return one line on which operations, by their titles, wait for which ranks."""
    entries = [f"{title} (missing on {ranks_text(ranks)})" for title, ranks in missing.items()]
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entries[:limit]) + more
