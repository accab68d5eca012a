"""``hvdlite bench training`` as for the published tables, and the figure of the README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from hvdlite.tools.cli import plots
from tests.benchmarks import files

_NEUTRAL = "#7a8490"


def overhead(document: Mapping[str, Any], path: Path) -> None:
    """Draw the percentage that the exchange adds to a step; legible on white and on black."""
    records = document["results"]
    figure, [[axes]] = plots.figure(5.4, 0.4 + 0.8 * len(records))
    contenders = {"hvdlite": "hvdlite", "ddp": "DDP on gloo"}
    for row, record in enumerate(records):
        alone = record["seconds"]["alone"]["median"]
        for offset, name in zip((-0.19, 0.19), contenders, strict=True):
            percent = 100 * record["overhead_seconds"][name]["median"] / alone
            bars = axes.barh(row + offset, percent, 0.34, color=plots.COLORS[name])
            text = f"{contenders[name]}  +{percent:.0f} %"
            axes.bar_label(bars, [text], padding=4, color=_NEUTRAL)
    axes.set_yticks(
        range(len(records)), [record["title"].replace(", ", "\n") for record in records]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * axes.get_xlim()[1])
    axes.set_xticks([])
    axes.tick_params(length=0, colors=_NEUTRAL)
    for spine in axes.spines.values():
        spine.set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    """Measure, print, write the JSON and the plots."""
    document, folder = files.bench("training", ["--seconds", "75"])
    if "ddp" in document["options"]["contenders"]:
        overhead(document, folder / "step_overhead.svg")


if __name__ == "__main__":
    main()
