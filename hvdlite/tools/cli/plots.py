"""Plots of the command line, by matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import StartError
from hvdlite.tools.bench import report
from hvdlite.tools.cli.arguments import check_file

SUFFIXES = (".png", ".pdf", ".svg")
# One colour for each contender, in all figures.
COLORS = {
    "hvdlite": "#d62728",
    "bucket": "#ff9896",
    "mpi": "#1f77b4",
    "gloo": "#2ca02c",
    "ddp": "#2ca02c",
    "ddp-no-buffers": "#98df8a",
    "ddp-hvdlite": "#ff7f0e",
    "ddp-hook": "#ffbb78",
    "fsdp": "#8c564b",
    "fsdp-hvdlite": "#c49c94",
    "memcpy": "#7f7f7f",
    "alone": "#7f7f7f",
}
_MILLISECONDS = 1e3


def check(path: str) -> None:
    """Refuse a plot that could not be written in the end, before it is measured."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise StartError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    check_file("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise StartError(f"--plot: {error}; run `pip install hvdlite[cli]`") from None


def figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """Return a figure that needs no display, and its rows of axes."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained", dpi=110)
    return made, made.subplots(rows, columns, squeeze=False)


def save(figure: Any, path: str | Path) -> None:
    """Write a figure."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise StartError(f"--plot {path}: {error.strerror}") from None


# Of the documents that hvdlite bench writes


def allreduce(document: Mapping[str, Any]) -> Any:
    """Draw times and ratios over size, and the burst; a row for each number of ranks."""
    records = document["results"]
    numbers = list(dict.fromkeys(record["ranks"] for record in records))
    single = [record for record in records if record["case"] == "allreduce"]
    bursts = [record for record in records if record["case"] == "burst"]
    columns = 2 * bool(single) + bool(bursts)
    made, grid = figure(1 + 4.5 * columns, 0.4 + 4 * len(numbers), columns, len(numbers))
    for ranks, row in zip(numbers, grid, strict=True):
        own = [record for record in single if record["ranks"] == ranks]
        if own:
            _over_size(row[0], own, "seconds", _MILLISECONDS)
            row[0].set_ylabel("ms (median, 10 - 90 %)")
            row[0].set_title(f"sum of float32 in place, {ranks} ranks")
            row[0].legend(fontsize="small")
            _over_size(row[1], own, "ratios", 1.0)
            row[1].axhline(1.0, color=COLORS["hvdlite"])
            row[1].set_ylabel("time / hvdlite's, within each round")
            row[1].set_title("above the red line: slower than hvdlite")
        for record in bursts:
            if record["ranks"] == ranks:
                _bars(row[-1], record["seconds"])
                row[-1].set_yscale("log")
                size = report.size_text(record["bytes"])
                row[-1].set_title(f"{record['tensors']} sums of {size} at once, {ranks} ranks")
                low, high = row[-1].get_ylim()
                row[-1].set_ylim(low / 2, high * 2)
    return _signed(made, document)


def _over_size(axes: Any, records: Sequence[Mapping[str, Any]], key: str, factor: float) -> None:
    """Draw lines of medians in bands from the 10th to the 90th percentile."""
    sizes = [record["bytes"] for record in records]
    for name in records[0][key]:
        low, median, high = (
            [factor * record[key][name][which] for record in records]
            for which in ("p10", "median", "p90")
        )
        style = "--o" if name == "memcpy" else "-o"
        axes.plot(sizes, median, style, color=COLORS[name], label=name, markersize=4)
        axes.fill_between(sizes, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [report.size_text(size) for size in sizes], rotation=30)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def models(document: Mapping[str, Any]) -> Any:
    """Draw the times of contenders over a line for the first; a panel for each model."""
    records = document["results"]
    numbers = list(dict.fromkeys(record["ranks"] for record in records))
    columns = len(records) // len(numbers)
    made, grid = figure(0.6 + 4.4 * columns, 0.4 + 4.4 * len(numbers), columns, len(numbers))
    for axes, record in zip(grid.flat, records, strict=True):
        seconds = record["seconds"]
        added = {
            name: f"{'+' if value['median'] >= 0 else ''}{report.time_text(value['median'])}"
            for name, value in record.get("overhead_seconds", {}).items()
        }
        _bars(axes, seconds, added)
        first = next(iter(seconds.values()))["median"]
        axes.axhline(_MILLISECONDS * first, color="black", linewidth=0.8)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
        axes.set_title(f"{record['title']}\n{record['framework']}, {record['ranks']} ranks")
    return _signed(made, document)


def _bars(
    axes: Any, seconds: Mapping[str, Mapping[str, float]], added: Mapping[str, str] | None = None
) -> None:
    """Draw bars of medians with their spread, in milliseconds, and texts above them."""
    low, median, high = (
        np.array([_MILLISECONDS * value[key] for value in seconds.values()])
        for key in ("p10", "median", "p90")
    )
    names = [name.replace("-", "\n", 1) for name in seconds]
    colors = [COLORS.get(name, COLORS["hvdlite"]) for name in seconds]
    spread = [median - low, high - median]
    bars = axes.bar(names, median, width=0.65, color=colors, yerr=spread, capsize=4)
    texts = [
        "\n".join(filter(None, [report.time_text(value["median"]), (added or {}).get(name)]))
        for name, value in seconds.items()
    ]
    axes.bar_label(bars, texts, padding=4, fontsize="small")
    axes.set_ylabel("ms (median, 10 - 90 %)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _signed(figure: Any, document: Mapping[str, Any]) -> Any:
    figure.supxlabel(report.describe(document), fontsize="small", color="gray")
    return figure
