"""``hvdlite scale``: how the speed of a script grows with the number of ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from hvdlite.errors import StartError
from hvdlite.tools.bench.report import count_text, table
from hvdlite.tools.cli import plots, script
from hvdlite.tools.cli.arguments import above_zero, add_hosts, add_plot, numbers, positive

HELP = "run a script on several numbers of ranks, and compare its speed"
SPEEDS = ("images_per_s", "samples_per_s")
WALL = "wall time"
EXAMPLES = """\
examples:
  hvdlite scale --np 1,2,4 --runs 3 examples/pytorch_mnist.py --epochs 1 --json
  hvdlite scale --np 1,2 --plot scaling.png train.py
  hvdlite scale --np 1,2 --metric tokens_per_s train.py
  hvdlite scale --np 1,2 --pattern 'speed: ([0-9.]+)' train.py

The speed is images_per_s or samples_per_s in the last line of JSON on standard output that has
one of them, or what --metric or --pattern says. Without any of these it is 1 / wall time of the
whole job, its start included. Options come before SCRIPT; --np may also follow it.
"""


class Run(NamedTuple):
    """The speed of a job, and its wall time with its start."""

    metric: str  # `WALL`: the job has reported none, and the value is the wall time
    value: float
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite scale``."""
    parser.description = (
        "Run a training script on several numbers of ranks, in turns, and print its speed, "
        "speed-up and efficiency."
    )
    add = parser.add_argument
    add("--np", type=numbers, metavar="1,2,4", help="numbers of ranks (1,2)")
    add("--runs", type=positive, default=3, metavar="K", help="at each number (%(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--metric", metavar="NAME", help="the speed's name in the line of JSON")
    source.add_argument(
        "--pattern", type=_pattern, metavar="REGEX", help="its first group is the speed"
    )
    add_hosts(parser)
    add("--json", action="store_true", help="print JSON")
    add_plot(parser)
    script.add_arguments(parser)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    if not pattern.groups:
        raise argparse.ArgumentTypeError(f"{text!r} has no group; put the number into parentheses")
    return pattern


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite scale`` and return its exit code: that of the first run that fails."""
    ranks, arguments = _ranks(options)
    if options.plot:
        plots.check(options.plot)
    command = script.command_of(options.script, arguments)
    runs: dict[int, list[Run]] = {number: [] for number in ranks}
    for turn in range(options.runs):
        # Forth and back: a machine that slows down in the course favours no number.
        for number in ranks if turn % 2 == 0 else ranks[::-1]:
            runs[number].append(_run(number, turn + 1, command, options))
    name, results = compare(runs)
    is_local = not (options.hosts or options.hostfile)
    document = {
        "script": options.script,
        "command": shlex.join(command),
        "metric": name,
        "cores": len(os.sched_getaffinity(0)) if is_local else None,
        "results": results,
    }
    if options.plot:
        plot(document, options.plot)
    print(json.dumps(document, indent=2) if options.json else describe(document))
    return 0


def _ranks(options: argparse.Namespace) -> tuple[list[int], list[str]]:
    """Return the numbers of ranks, and the script's arguments without a ``--np`` among them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--np", type=numbers, default=options.np or [1, 2])
    try:
        late, words = parser.parse_known_args(options.args)
    except argparse.ArgumentError as error:
        raise StartError(str(error)) from None
    return late.np, words


def _run(number: int, turn: int, command: Sequence[str], options: argparse.Namespace) -> Run:
    """Run the job once, and read its speed from its output."""
    title = f"{count_text(number, 'rank')}, run {turn} of {options.runs}"
    words = ["-np", str(number)]
    words += ["-H", options.hosts] if options.hosts else []
    words += ["--hostfile", options.hostfile] if options.hostfile else []
    job = script.run(f"hvdlite scale: {title}", words, command)
    seconds = job.seconds
    if job.code:
        lines = (job.err or job.out).splitlines()[-script.LAST_LINES :]
        text = f"{title}: exit code {job.code}; the last lines of its output:"
        raise StartError("\n".join([text, *lines]), job.code)
    metric, value = find_speed(job.out, options.metric, options.pattern) or (WALL, seconds)
    unit = "" if metric == WALL else f"{metric} {value:.4g}, "
    print(f"hvdlite scale: {title}: {unit}{seconds:.1f} s", file=sys.stderr, flush=True)
    return Run(metric, value, seconds)


def find_speed(
    text: str, metric: str | None = None, pattern: re.Pattern[str] | None = None
) -> tuple[str, float] | None:
    """Return the name and the value of the speed in a job's standard output.

    It is the last match of a pattern's first group, or the last one of that name in lines of JSON;
    without both one of `SPEEDS`, or None if there is none.

    Raises:
        StartError: what was asked for is not there, or is no number above 0.
    """
    if pattern is not None:
        matches = list(pattern.finditer(text))
        if not matches:
            raise StartError(f"--pattern {pattern.pattern!r} matches nothing in the output")
        return _speed(f"--pattern {pattern.pattern!r}", "speed", matches[-1].group(1))
    names = SPEEDS if metric is None else (metric,)
    others: dict[str, Any] = {}
    for line in reversed(text.splitlines()):
        values = _object(line)
        for name in names:
            if values.get(name) is not None:
                return _speed(name, name, values[name])
        others = others or values
    if metric is None:
        return None
    found = f"its last line of JSON has {', '.join(others)}" if others else "it has no line of JSON"
    raise StartError(f"--metric {metric} is not in the output: {found}")


def _object(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(line[line.index("{") :])  # a launcher may prefix the rank
        return value if isinstance(value, dict) else {}
    return {}


def _speed(source: str, name: str, value: Any) -> tuple[str, float]:
    try:
        return name, above_zero(value)
    except argparse.ArgumentTypeError as error:
        raise StartError(f"{source}: {error}") from None


# Comparing


def compare(runs: Mapping[int, Sequence[Run]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the metric's name, and a record of the speed at each number of ranks.

    The smallest number of ranks is taken for ideal: ``efficiency`` is the ``speedup`` per rank,
    which is so many times as fast as one. ``runs`` has the speed in each run (for the wall time
    seconds), ``mean`` and ``deviation`` (None: of one run) are theirs; ``seconds`` is the mean
    wall time of a job.

    Raises:
        StartError: some of the runs have reported their speed, and others have not.
    """
    names = {run.metric for each in runs.values() for run in each}
    if len(names) > 1:
        raise StartError(
            f"the speed is {' in some runs, and '.join(sorted(names))} in others; print the same "
            "from every run"
        )
    (name,) = names
    first = min(runs)
    ideal = fmean(run.value for run in runs[first])
    results = []
    for number, each in runs.items():
        values = [run.value for run in each]
        mean = fmean(values)
        speedup = first * (ideal / mean if name == WALL else mean / ideal)
        results.append(
            {
                "ranks": number,
                "runs": values,
                "mean": mean,
                "deviation": stdev(values) if len(values) > 1 else None,
                "speedup": speedup,
                "efficiency": speedup / number,
                "seconds": fmean(run.seconds for run in each),
            }
        )
    return name, results


def describe(document: Mapping[str, Any]) -> str:
    """Return the comparison as text."""
    metric, cores, results = document["metric"], document["cores"], document["results"]
    head = "seconds" if metric == WALL else metric
    rows = [
        (
            f"{each['ranks']:>5}",
            f"{each['mean']:.5g}",
            "-" if each["deviation"] is None else f"{each['deviation']:.4g}",
            f"{each['speedup']:.2f}",
            f"{each['efficiency']:.1%}",
        )
        for each in results
    ]
    lines = [table(["ranks", head, "deviation", "speed-up", "efficiency"], rows)]
    if metric == WALL:
        lines.append(
            f"note: found no {' or '.join(SPEEDS)} in the output; the speed is the wall time, "
            "with the start, of work that must be the same on any number of ranks"
        )
    fewest, most = results[0]["ranks"], results[-1]["ranks"]
    if fewest > 1:
        lines.append(f"note: {fewest} ranks are taken for ideal; add 1 to --np")
    if cores and most > cores:
        lines.append(f"note: this host has {cores} cores; more ranks than that share them")
    return "\n".join(lines)


def plot(document: Mapping[str, Any], path: str) -> None:
    """Draw the speed and the efficiency over the number of ranks."""
    figure, [[left, right]] = plots.figure(10, 4.2, columns=2)
    results, is_wall = document["results"], document["metric"] == WALL
    ranks = [each["ranks"] for each in results]
    values = np.array([each["speedup" if is_wall else "mean"] for each in results])
    spread = values * [(each["deviation"] or 0) / each["mean"] for each in results]
    unit = "speed-up (by wall time)" if is_wall else document["metric"]
    color = plots.COLORS["hvdlite"]
    ideal = values[0] / ranks[0] * np.array(ranks)
    left.plot(ranks, ideal, ":", color="black", label="ideal: that many times one alone")
    label = "measured (mean and standard deviation)"
    left.plot(ranks, values, "-o", color=color, label=label, markersize=4)
    left.fill_between(ranks, values - spread, values + spread, color=color, alpha=0.15, linewidth=0)
    left.set_ylim(bottom=0)
    left.legend()
    efficiency = [100 * each["efficiency"] for each in results]
    right.axhline(100, linestyle=":", color="black")
    right.plot(ranks, efficiency, "-o", color=color, markersize=4)
    for at in zip(ranks, efficiency, strict=True):
        right.annotate(
            f"{at[1]:.0f}%", at, xytext=(0, -14), textcoords="offset points", ha="center"
        )
    right.set_ylim(0, max(110, 1.05 * max(efficiency)))
    right.margins(x=0.12)
    for axes, name in ((left, unit), (right, "efficiency in %")):
        axes.set_xticks(ranks, [str(number) for number in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    figure.suptitle(Path(document["script"]).name, fontsize="medium")
    plots.save(figure, path)
