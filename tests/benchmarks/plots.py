"""The plots of the benchmarks that ``hvdlite bench`` does not run, and the figure of the README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from hvdlite.tools.bench import report
from hvdlite.tools.cli import plots

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


def scaling(document: Mapping[str, Any], path: Path) -> None:
    """Images per second over the number of processes."""
    records = document["results"]
    processes = [record["processes"] for record in records]
    figure, [[axes]] = plots.figure(7, 5)
    series = {}
    for name, label in (
        ("alone", "without exchange: this machine's limit"),
        ("hvdlite", "hvdlite"),
    ):
        values = [record["images_per_second"][name] for record in records]
        median, low, high = ([value[key] for value in values] for key in ("median", "p10", "p90"))
        series[label] = median, low, high, plots.COLORS[name]
    unit = "images per second (median, 10 - 90 %)"
    single = records[0]["images_per_second"]["alone"]["median"]
    plots.speed_over_ranks(axes, processes, single, series, unit)
    axes.set_xticks(processes, [_scaling_text(record) for record in records])
    axes.set_xlabel("processes, of one thread each")
    axes.set_title(f"ResNet-18 at 32x32, batch {records[0]['batch_per_process']} per process")
    figure.supxlabel(report.describe(document), fontsize="small", color="gray")
    figure.savefig(path)


def _scaling_text(record: Mapping[str, Any]) -> str:
    speedup, limit = record["speedup"]["median"], record["of_limit"]["median"]
    return f"{record['processes']}\n{speedup:.2f}x one alone\n{limit:.0%} of the limit"
