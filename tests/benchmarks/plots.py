"""The benchmarks' plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tests.benchmarks import report

plt.switch_backend("agg")  # Files only: there need not be a display.

_COLORS = {
    "hvdlite": "#d62728",
    "hvdlite bucket": "#ff9896",
    "mpi": "#1f77b4",
    "gloo": "#2ca02c",
    "ddp": "#2ca02c",
    "ddp, no buffers": "#98df8a",
    "horovod": "#9467bd",
    "memcpy": "#7f7f7f",
    "alone": "#7f7f7f",
}
_MILLISECONDS = 1e3
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def allreduce(document: Mapping[str, Any], path: Path) -> None:
    """Times and ratios over size, and the burst: a column for each number of ranks."""
    records = document["results"]
    columns = list(dict.fromkeys(record["ranks"] for record in records))
    figure, grid = plt.subplots(
        3,
        len(columns),
        figsize=(6.5 * len(columns), 13),
        squeeze=False,
        sharey="row",
        height_ratios=(5, 4, 2.5),
        layout="constrained",
    )
    for ranks, (times, ratios, burst) in zip(columns, grid.T, strict=True):
        own = [record for record in records if record["ranks"] == ranks]
        single = [record for record in own if record["case"] == "allreduce"]
        _times_over_size(times, single)
        times.set_title(f"Sum of float32 in place, {ranks} ranks")
        _ratios_over_size(ratios, single)
        _burst(burst, [record for record in own if record["case"] == "burst"])
    _limit_bursts(grid[2], [record for record in records if record["case"] == "burst"])
    _finish(figure, document, path)


def _times_over_size(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    sizes = [record["bytes"] for record in records]
    for name in _names(records, "seconds"):
        values = [record["seconds"][name] for record in records]
        _line(axes, sizes, values, name, _MILLISECONDS, "--" if name == "memcpy" else "-")
    axes.set_ylabel("ms (median, 10 - 90 %)")
    _size_axis(axes, sizes)


def _ratios_over_size(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    sizes = [record["bytes"] for record in records]
    for name in _names(records, "ratios"):
        values = [record["ratios"][name] for record in records]
        over, _, under = name.partition(" / ")
        _line(axes, sizes, values, name, 1.0, "--" if under == "memcpy" else "-", over)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("ratio of times within a round")
    _size_axis(axes, sizes)


def _line(
    axes: Any,
    x: Sequence[float],
    values: Sequence[Mapping[str, float]],
    label: str,
    factor: float,
    style: str = "-",
    color: str | None = None,
) -> None:
    """A line of medians in a band from the 10th to the 90th percentile."""
    paint = _COLORS.get(color or label)
    low, median, high = (
        [factor * value[key] for value in values] for key in ("p10", "median", "p90")
    )
    axes.plot(x, median, style, color=paint, label=label, marker="o", markersize=4)
    axes.fill_between(x, low, high, color=paint, alpha=0.15, linewidth=0)


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: report.size_text(int(size))))
    axes.tick_params(axis="x", labelrotation=30)
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.tick_params(axis="y", labelleft=True)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")


def _burst(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    if not records:
        axes.set_axis_off()
        return
    (record,) = records
    _bars(axes, record["seconds"])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.tick_params(axis="y", labelleft=True)
    axes.set_ylabel("ms")
    size = report.size_text(record["bytes"])
    axes.set_title(f"{record['tensors']} sums of {size} at once", fontsize="medium")


def _limit_bursts(panels: Sequence[Any], records: Sequence[dict[str, Any]]) -> None:
    """One scale for all, with room for the numbers above the bars."""
    times = [time for record in records for time in record["seconds"].values()]
    if times:
        low = _MILLISECONDS * min(time["p10"] for time in times)
        high = _MILLISECONDS * max(time["p90"] for time in times)
        for axes in panels:
            axes.set_ylim(low / 2, high * 4)


def training(document: Mapping[str, Any], path: Path) -> None:
    """The time of a step, with what the exchange adds: a panel for each model."""
    records = document["results"]
    figure, panels = plt.subplots(
        1, len(records), figsize=(4.6 * len(records), 4.8), squeeze=False, layout="constrained"
    )
    for axes, record in zip(panels[0], records, strict=True):
        seconds = record["seconds"]
        added = {
            name: f"{'+' if value['median'] >= 0 else ''}{report.time_text(value['median'])}"
            for name, value in record["overhead_seconds"].items()
        }
        _bars(axes, seconds, added)
        axes.axhline(_MILLISECONDS * seconds["alone"]["median"], color="black", linewidth=0.8)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        axes.set_ylabel("ms per step (median, 10 - 90 %)")
        axes.set_title(f"{record['title']}\n{record['framework']}, {record['ranks']} ranks")
    _finish(figure, document, path)


def _bars(
    axes: Any, seconds: Mapping[str, Mapping[str, float]], added: Mapping[str, str] | None = None
) -> None:
    """Bars of medians with their spread, in milliseconds, and what is to be written above."""
    for position, (name, value) in enumerate(seconds.items()):
        median, low, high = (_MILLISECONDS * value[key] for key in ("median", "p10", "p90"))
        axes.bar(position, median, color=_COLORS.get(name), width=0.65)
        spread = [[median - low], [high - median]]
        axes.errorbar(position, median, yerr=spread, color="black", capsize=4, linewidth=1)
        text = "\n".join(filter(None, [report.time_text(value["median"]), (added or {}).get(name)]))
        axes.annotate(
            text,
            (position, high),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    axes.set_xticks(range(len(seconds)), list(seconds))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def scaling(document: Mapping[str, Any], path: Path) -> None:
    """Images per second over the number of processes."""
    records = document["results"]
    processes = [record["processes"] for record in records]
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    single = records[0]["images_per_second"]["alone"]["median"]
    ideal = [number * single for number in processes]
    axes.plot(processes, ideal, ":", color="black", label="ideal: that many times one alone")
    for name, label in (("alone", "without exchange: this machine's limit"), ("hvdlite", None)):
        values = [record["images_per_second"][name] for record in records]
        _line(axes, processes, values, label or name, 1.0, color=name)
    axes.set_xticks(processes, [_scaling_text(record) for record in records])
    axes.set_xlabel("processes, of one thread each")
    axes.set_ylabel("images per second (median, 10 - 90 %)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"ResNet-18 at 32x32, batch {records[0]['batch_per_process']} per process")
    axes.legend()
    axes.grid(alpha=0.3)
    _finish(figure, document, path)


def _scaling_text(record: Mapping[str, Any]) -> str:
    speedup, limit = record["speedup"]["median"], record["of_limit"]["median"]
    return f"{record['processes']}\n{speedup:.2f}x one alone\n{limit:.0%} of the limit"


def _names(records: Sequence[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record[key]))


def _finish(figure: Any, document: Mapping[str, Any], path: Path) -> None:
    figure.supxlabel(report.describe(document), fontsize="small", color="gray")
    figure.savefig(path, dpi=110)
    plt.close(figure)
