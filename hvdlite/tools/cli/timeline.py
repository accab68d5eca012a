"""``hvdlite timeline``: what a trace tells."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from hvdlite.base.files import replacing
from hvdlite.errors import StartError
from hvdlite.tools.bench.report import table
from hvdlite.tools.trace import page
from hvdlite.tools.trace.advice import advise
from hvdlite.tools.trace.analysis import Analysis, Share, Tensor, read
from hvdlite.tools.trace.page import share_text, time_text

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
    parser.add_argument("file", metavar="FILE", help="hvdlite's timeline, or Horovod's")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds")
    parser.add_argument("--html", metavar="PAGE", help="write a page that needs no network")


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite timeline`` and return its exit code.

    Raises:
        StartError: the file is no trace, or the page cannot be written.
    """
    analysis = read(options.file)
    document = as_document(analysis)
    if options.html:
        try:
            with replacing(Path(options.html)) as file:
                file.write(page.render(document, analysis.detail).encode())
        except OSError as error:
            raise StartError(f"--html {options.html}: {error.strerror}") from None
    print(json.dumps(document, indent=2) if options.json else describe(analysis))
    return 0


def as_document(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis and its hints for JSON; times are in seconds, to the microsecond."""
    names = (field.name for field in dataclasses.fields(analysis) if field.name != "detail")
    document = {name: _rounded(getattr(analysis, name)) for name in names}
    return {**document, "hints": advise(analysis)}


def _rounded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return round(value, 6) + 0.0 if isinstance(value, float) else value


def describe(analysis: Analysis) -> str:
    """Return the analysis as text."""
    steps = analysis.steps
    lines = [f"note: {analysis.problem}"] if analysis.problem else []
    of = f", {steps.count} {steps.marker}" if steps.count > 1 else ""
    lines.append(f"{len(analysis.shares)} ranks{of}, {analysis.events} events by {analysis.origin}")
    if steps.count > 1:
        lines.append(
            f"time of a step: median {time_text(steps.seconds_median)}, "
            f"mean {time_text(steps.seconds_mean)}, longest {time_text(steps.seconds_max)}"
        )
    heads = ("rank", "seconds", "compute", "exchange", "waiting", "hidden exchange")
    lines += ["", table(heads, map(_share, analysis.shares))]
    if analysis.slowest is not None:
        slowest = analysis.slowest
        waited, per_step = time_text(slowest.waited), slowest.waited_per_step
        each = "" if per_step is None else f", {time_text(per_step)} per step"
        lines += [
            "",
            f"slowest: rank {slowest.rank}, last at {slowest.last:.0%} of the operations",
            f"the others waited {waited} for it{each}",
        ]
    lines += ["", table(_TENSOR_HEADS, map(_tensor, analysis.tensors))]
    lines += ["", *(f"hint: {hint}" for hint in advise(analysis))]
    return "\n".join(lines)


def _share(share: Share) -> tuple[str, ...]:
    parts = (share.compute, share.exchange, share.waiting, share.hidden)
    texts = (share_text(part, share.seconds) for part in parts)
    return share.name, f"{share.seconds:.3f}", *texts


def _tensor(tensor: Tensor) -> tuple[str, ...]:
    last = "-" if tensor.last_rank is None else f"{tensor.last_rank} ({tensor.last:.0%})"
    return (
        tensor.name,
        str(tensor.count),
        f"{tensor.nbytes / 1e6:.3f}" if tensor.nbytes else "-",
        f"{tensor.sent / 1e6:.3f}" if tensor.sent else "-",
        time_text(tensor.exchange),
        time_text(tensor.exchange_max),
        f"{tensor.exchange_share:.1%}",
        time_text(tensor.late),
        last,
    )
