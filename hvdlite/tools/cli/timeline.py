"""``hvdlite timeline``: what a trace tells, as text, as JSON, and as a page to zoom into."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from hvdlite.base.files import replacing
from hvdlite.errors import StartError
from hvdlite.tools.bench.report import table, time_text
from hvdlite.tools.trace.analysis import hints_of, read
from hvdlite.tools.trace.record import Integers, RankRecord, Record

HELP = "show who waited for whom in a recorded timeline"
EXAMPLES = """\
examples:
  hvdliterun -np 2 --timeline-filename trace.json python train.py
  hvdlite timeline trace.json                    shares, the slowest rank, the worst buckets
  hvdlite timeline trace.json --html trace.html  the same as a page, with the events to zoom into
  hvdlite timeline trace.json --json             the same for programs
"""

_TEMPLATE = Path(__file__).with_suffix(".html")
_MOST_INTERVALS = 60_000  # 2 MB of text
_STEPS_IN_VIEW = 12  # before the user zooms
_MOST_BARS = 1000  # in the chart of the steps
# The parts of a rank's time; the last one is a part of the first.
_PARTS = ("compute", "exchange", "waiting", "hidden")
_TENSOR_HEADS = (
    "bucket or tensor",
    "count",
    "MB",
    "sent MB",
    "exchange",
    "longest",
    "share",
    "late",
    "last rank",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite timeline``."""
    parser.description = (
        "Tell from a timeline how much of each rank's time goes into compute, exchange and "
        "waiting, which rank the others wait for, and which buckets take longest."
    )
    parser.add_argument("file", metavar="FILE", help="a timeline")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds")
    parser.add_argument("--html", metavar="PAGE", help="write a page that needs no network")


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite timeline`` and return its exit code."""
    figures, record = read(options.file)
    exact = json.dumps({**figures, "hints": hints_of(figures)})
    # To the microsecond; a zero has no sign.
    document = json.loads(exact, parse_float=lambda text: round(float(text), 6) + 0.0)
    if options.html:
        try:
            with replacing(Path(options.html)) as file:
                file.write(_render(document, record).encode())
        except OSError as error:
            raise StartError(f"--html {options.html}: {error.strerror}") from None
    print(json.dumps(document, indent=2) if options.json else describe(document))
    return 0


def describe(document: Mapping[str, Any]) -> str:
    """Return the analysis as text."""
    steps, slowest, shares = document["steps"], document["slowest"], document["shares"]
    count = steps["count"]
    lines = [f"note: {document['problem']}"] if document["problem"] else []
    of = f", {count} {steps['marker']}" if count > 1 else ""
    lines.append(f"{len(shares)} ranks{of}, {document['events']} events")
    if count > 1:
        lines.append(
            f"time of a step: median {time_text(steps['seconds_median'])}, "
            f"mean {time_text(steps['seconds_mean'])}, longest {time_text(steps['seconds_max'])}"
        )
    rows = [
        (share["name"], f"{share['seconds']:.3f}", *_share_cells(share).values())
        for share in shares
    ]
    lines += ["", table(("rank", "seconds", *_PARTS[:-1], "hidden exchange"), rows)]
    if slowest is not None:
        waited, per_step = time_text(slowest["waited"]), slowest["waited_per_step"]
        each = "" if per_step is None else f", {time_text(per_step)} per step"
        lines += [
            "",
            f"slowest: rank {slowest['rank']}, last at {slowest['last']:.0%} of the operations",
            f"the others waited {waited} for it{each}",
        ]
    tensors = [(each["name"], *_tensor_cells(each).values()) for each in document["tensors"]]
    lines += ["", table(_TENSOR_HEADS, tensors)]
    lines += ["", *(f"hint: {hint}" for hint in document["hints"])]
    return "\n".join(lines)


def _share_cells(share: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of a rank's time in percent, by column."""
    whole = share["seconds"] or 1.0
    return {part: f"{share[part] / whole:.1%}" for part in _PARTS}


def _tensor_cells(tensor: Mapping[str, Any]) -> dict[str, str]:
    """Return a tensor's figures as texts, by column; bytes are in millions."""
    last = tensor["last_rank"]
    return {
        "count": str(tensor["count"]),
        "bytes": f"{tensor['nbytes'] / 1e6:.3f}" if tensor["nbytes"] else "-",
        "sent": f"{tensor['sent'] / 1e6:.3f}" if tensor["sent"] else "-",
        "exchange": time_text(tensor["exchange"]),
        "longest": time_text(tensor["exchange_max"]),
        "share": f"{tensor['exchange_share']:.1%}",
        "late": time_text(tensor["late"]),
        "last": "-" if last is None else f"{last} ({tensor['last']:.0%})",
    }


# The page


def _render(document: Mapping[str, Any], record: Record) -> str:
    """Return the page: the figures of an analysis as JSON has it, and lanes of its arrays."""
    problem = document["problem"]
    first, last, shown = _window(record)
    lanes = {
        "start": first,
        "end": last,
        "view": int(_STEPS_IN_VIEW * 1e6 * document["steps"]["seconds_median"]) or last - first,
        "names": [share["name"] for share in document["shares"]],
        "tensors": [name for _, name in record.tensors],
        "bytes": [nbytes for _, nbytes, _ in record.tensors.values()],
        "ranks": _ranks(record, first, last),
        "steps": _step_times(next(iter(record.ranks.values())).ends),
    }
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"Timeline {Path(document['file']).name}"),
        problem=f'<p class="problem">{escape(problem)}</p>' if problem else "",
        summary=_summary(document),
        hints="".join(f"<li>{escape(hint)}</li>" for hint in document["hints"]),
        shares=_shares(document["shares"]),
        tensors="".join(_tensor(tensor) for tensor in document["tensors"]),
        shown=escape(shown),
        # A tensor may be called </script>.
        document=json.dumps(document).replace("<", "\\u003c"),
        lanes=json.dumps(lanes, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _summary(document: Mapping[str, Any]) -> str:
    steps, slowest = document["steps"], document["slowest"]
    facts = [("ranks", str(len(document["shares"])), "")]
    if steps["count"] > 1:
        facts += [
            ("steps", str(steps["count"]), steps["marker"]),
            ("time of a step", time_text(steps["seconds_median"]), "median"),
            ("longest step", time_text(steps["seconds_max"]), ""),
        ]
    if slowest is not None:
        per_step = slowest["waited_per_step"]
        waited = time_text(slowest["waited"] if per_step is None else per_step)
        per = "" if per_step is None else " per step"
        facts.append(("slowest rank", str(slowest["rank"]), f"others wait {waited}{per}"))
    return "".join(
        f'<div class="fact"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(more)}</small></div>"
        for name, value, more in facts
    )


def _shares(shares: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for share in shares:
        whole = share["seconds"]
        bar = "".join(
            f'<i class="{part}" style="width:{100 * (share[part] or 0) / (whole or 1):.3f}%"></i>'
            for part in _PARTS[:-1]
        )
        rows.append(
            f'<tr data-rank="{share["rank"]}"><th>{escape(share["name"])}</th>'
            f'<td class="bar"><div>{bar}</div></td>{_cells(_share_cells(share))}'
            f'<td class="seconds">{whole:.3f} s</td></tr>'
        )
    return "".join(rows)


def _tensor(tensor: Mapping[str, Any]) -> str:
    return f"<tr><th>{escape(tensor['name'])}</th>{_cells(_tensor_cells(tensor))}</tr>"


def _cells(texts: Mapping[str, str]) -> str:
    return "".join(f'<td class="{name}">{text}</td>' for name, text in texts.items())


# The lanes of the page


def _window(record: Record) -> tuple[int, int, str]:
    """Return the part of the trace that the page has room for, in microseconds, and its name."""
    found = list(record.ranks.values())
    first, last = min(own.first for own in found), max(own.last for own in found)
    events = [own.operations.start for own in found] * 2 + [own.blocked[0] for own in found]
    times = np.sort(np.concatenate(events))
    times = times[(times >= first) & (times <= last)]
    if len(times) <= _MOST_INTERVALS:
        return first, last, "All analysed steps."
    ends = np.asarray(found[0].ends)
    if len(ends) < 2:
        return first, int(times[_MOST_INTERVALS]), "The beginning; the file is too large for more."
    longest = int(np.diff(ends).argmax()) + 1
    centre = int(np.searchsorted(times, ends[longest]))
    begin = min(max(centre - _MOST_INTERVALS // 2, 0), len(times) - _MOST_INTERVALS)
    first, last = int(times[begin]), int(times[begin + _MOST_INTERVALS - 1])
    steps = np.flatnonzero((ends > first) & (ends <= last)) + 1
    shown = f"Steps {steps[0]} to {steps[-1]}" if len(steps) else "A part"
    where = f"of {len(ends)}, around the longest step, {longest + 1}"
    return first, last, f"{shown} {where}: the page has no room for all."


def _ranks(record: Record, first: int, last: int) -> list[Any]:
    """Return the lanes of each rank: blocked times, and the operations of each row."""
    rows = [row for row, _ in record.tensors]
    ranks = []
    for found in record.ranks.values():
        operations = found.operations
        own = operations[(operations.end > first) & (operations.start < last)]
        ready = np.where(own.ready < 0, own.start, own.ready)
        columns = np.stack(
            [own.tensor, ready - first, own.start - ready, own.end - own.start], axis=1
        )
        ranks.append(
            {
                "blocked": _blocked(found, first, last),
                "rows": {
                    name: columns[[rows[n] == name for n in own.tensor]].ravel().tolist()
                    for name in sorted({rows[n] for n in own.tensor})
                },
            }
        )
    return ranks


def _blocked(record: RankRecord, first: int, last: int) -> list[int]:
    """Return the blocked times as start, duration, and whether an operation ran; flat."""
    edges = np.unique(np.concatenate([*record.blocked, *record.busy, [first, last]]))
    edges = edges[(edges >= first) & (edges <= last)]
    starts, ends = edges[:-1], edges[1:]
    chosen = _inside(starts, *record.blocked)
    busy = _inside(starts, *record.busy)
    table = np.stack([starts - first, ends - starts, busy], axis=1)[chosen]
    result: list[int] = table.ravel().tolist()
    return result


def _inside(times: Integers, starts: Integers, ends: Integers) -> Any:
    """Return for each time whether it lies in one of disjoint intervals."""
    return np.searchsorted(starts, times, "right") > np.searchsorted(ends, times, "right")


def _step_times(ends: Any) -> dict[str, Any]:
    """Return the times of all steps in microseconds, of a long run the longest of each few."""
    times = np.diff(np.asarray(ends, dtype=np.int64))
    each = max(-(-len(times) // _MOST_BARS), 1)
    padded = np.append(times, np.zeros(-len(times) % each, np.int64))
    return {"each": each, "times": padded.reshape(-1, each).max(axis=1, initial=0).tolist()}
