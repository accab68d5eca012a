"""``hvdlite timeline``: what a trace tells."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdlite.base.files import replacing
from hvdlite.errors import StartError
from hvdlite.tools.bench.report import table
from hvdlite.tools.trace import page
from hvdlite.tools.trace.analysis import advise, read
from hvdlite.tools.trace.page import PARTS, share_cells, tensor_cells, time_text

HELP = "show who waited for whom in a recorded timeline"
EXAMPLES = """\
examples:
  hvdliterun -np 2 --timeline-filename trace.json python train.py
  hvdlite timeline trace.json                    shares, the slowest rank, the worst buckets
  hvdlite timeline trace.json --html trace.html  the same as a page, with the events to zoom into
  hvdlite timeline trace.json --json             the same for programs
"""

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
    exact = json.dumps({**figures, "hints": advise(figures)})
    # To the microsecond; a zero has no sign.
    document = json.loads(exact, parse_float=lambda text: round(float(text), 6) + 0.0)
    if options.html:
        try:
            with replacing(Path(options.html)) as file:
                file.write(page.render(document, record).encode())
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
        (share["name"], f"{share['seconds']:.3f}", *share_cells(share).values()) for share in shares
    ]
    lines += ["", table(("rank", "seconds", *PARTS[:-1], "hidden exchange"), rows)]
    if slowest is not None:
        waited, per_step = time_text(slowest["waited"]), slowest["waited_per_step"]
        each = "" if per_step is None else f", {time_text(per_step)} per step"
        lines += [
            "",
            f"slowest: rank {slowest['rank']}, last at {slowest['last']:.0%} of the operations",
            f"the others waited {waited} for it{each}",
        ]
    tensors = [(each["name"], *tensor_cells(each).values()) for each in document["tensors"]]
    lines += ["", table(_TENSOR_HEADS, tensors)]
    lines += ["", *(f"hint: {hint}" for hint in document["hints"])]
    return "\n".join(lines)
