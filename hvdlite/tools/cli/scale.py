"""``hvdlite scale``: how the speed of a script grows with the number of ranks."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import IO, Any

from hvdlite.errors import StartError
from hvdlite.launch.cli import check
from hvdlite.tools.bench.report import count_text
from hvdlite.tools.cli import plots
from hvdlite.tools.cli.arguments import numbers, positive

HELP = "run a script on several numbers of ranks, and compare its speed"
SPEEDS = ("images_per_s", "samples_per_s")
WALL = "wall time"
_LAST_LINES = 15
_SECONDS_BETWEEN_NEWS = 60.0
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


@dataclass(frozen=True)
class Speed:
    """The speed on a number of ranks.

    Attributes:
        ranks: the number.
        runs: the speed in each run; for the wall time seconds.
        mean, deviation: their mean, and their standard deviation; None: there is one run only.
        speedup: how many times as fast as one rank.
        efficiency: ``speedup`` per rank; 1 is ideal.
        seconds: the wall time of a run in the mean, the start of the job included.
    """

    ranks: int
    runs: Sequence[float]
    mean: float
    deviation: float | None
    speedup: float
    efficiency: float
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
    add("-H", "--hosts", metavar="HOSTS", help="as for hvdliterun, e.g. node1:2,node2:2")
    add("--hostfile", metavar="FILE", help="as for hvdliterun")
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="FILE", help="write a plot: .png, .pdf or .svg")
    add("script", metavar="SCRIPT", help="a Python script, or a program")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    if not pattern.groups:
        raise argparse.ArgumentTypeError(f"{text!r} has no group; put the number into parentheses")
    return pattern


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite scale`` and return its exit code: that of the first run that fails.

    Raises:
        StartError: a mistake on the command line, or the output lacks the speed.
    """
    ranks, arguments = _ranks(options)
    if options.plot:
        plots.check(options.plot)
    is_python = options.script.endswith(".py")
    command = [*([sys.executable] if is_python else []), options.script, *arguments]
    check(command, os.environ)
    runs: dict[int, list[Run]] = {number: [] for number in ranks}
    for turn in range(options.runs):
        # Forth and back: a machine that slows down in the course favours no number.
        for number in ranks if turn % 2 == 0 else ranks[::-1]:
            run = _run(number, turn + 1, command, options)
            if run.code:
                return run.code
            runs[number].append(run)
    name, table = compare(runs)
    is_local = not (options.hosts or options.hostfile)
    document = {
        "script": options.script,
        "command": shlex.join(command),
        "metric": name,
        "cores": len(os.sched_getaffinity(0)) if is_local else None,
        "results": [asdict(speed) for speed in table],
    }
    if options.plot:
        plot(document, table, Path(options.plot))
    print(json.dumps(document, indent=2) if options.json else describe(document, table))
    return 0


def _ranks(options: argparse.Namespace) -> tuple[list[int], list[str]]:
    """Return the numbers of ranks, and the script's arguments without a ``--np`` among them."""
    words, found = list(options.args), options.np
    for at, word in enumerate(words):
        if word == "--":
            break
        if word == "--np" or word.startswith("--np="):
            value = word[5:] if "=" in word else "".join(words[at + 1 : at + 2])
            try:
                found = numbers(value)
            except argparse.ArgumentTypeError as error:
                raise StartError(f"--np: {error}") from None
            del words[at : at + (1 if "=" in word else 2)]
            break
    return found or [1, 2], words


# Running


@dataclass(frozen=True)
class Run:
    """The outcome of a job.

    Attributes:
        code: its exit code.
        seconds: its wall time.
        metric: the name of its speed; `WALL`: it has told none.
        value: the speed, or the wall time.
    """

    code: int
    seconds: float
    metric: str
    value: float


def _run(number: int, turn: int, command: Sequence[str], options: argparse.Namespace) -> Run:
    """Run the job once, and read its speed from its output."""
    title = f"{count_text(number, 'rank')}, run {turn} of {options.runs}"
    words = [sys.executable, "-m", "hvdlite.launch", "-np", str(number)]
    words += ["-H", options.hosts] if options.hosts else []
    words += ["--hostfile", options.hostfile] if options.hostfile else []
    # Files, because a pipe would stay open as long as anything that the job has left behind.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.monotonic()
        code = _wait([*words, *command], output, errors, title)
        seconds = time.monotonic() - start
        output.seek(0)
        text = output.read()
        if code:
            errors.seek(0)
            lines = (errors.read().splitlines() or text.splitlines())[-_LAST_LINES:]
            _say(f"{title}: exit code {code}; the last lines of its output:")
            print("\n".join(lines), file=sys.stderr)
            return Run(code, seconds, WALL, seconds)
    metric, value = find_speed(text, options.metric, options.pattern) or (WALL, seconds)
    unit = "" if metric == WALL else f"{metric} {value:.4g}, "
    _say(f"{title}: {unit}{seconds:.1f} s")
    return Run(0, seconds, metric, value)


def _wait(words: Sequence[str], output: IO[str], errors: IO[str], title: str) -> int:
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    try:
        for minute in range(1, 10**9):
            try:
                code = process.wait(_SECONDS_BETWEEN_NEWS)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                _say(f"{title}: running for {minute * _SECONDS_BETWEEN_NEWS:.0f} s")
    finally:
        if process.poll() is None:  # the launcher ends its ranks
            process.terminate()
            process.wait()
    raise AssertionError


def _say(text: str) -> None:
    print(f"hvdlite scale: {text}", file=sys.stderr, flush=True)


def find_speed(
    text: str, metric: str | None = None, pattern: re.Pattern[str] | None = None
) -> tuple[str, float] | None:
    """Return the name and the value of the speed in a job's output.

    Args:
        text: its standard output.
        metric: the name of a number in a line of JSON; None: one of `SPEEDS`.
        pattern: a regular expression whose first group is the speed, in its last match.

    Returns:
        None if neither was asked for and there is none.

    Raises:
        StartError: what was asked for is not there, or is no number above 0.
    """
    if pattern is not None:
        matches = list(pattern.finditer(text))
        if not matches:
            raise StartError(f"--pattern {pattern.pattern!r} matches nothing in the output")
        return _checked(f"--pattern {pattern.pattern!r}", "speed", matches[-1].group(1))
    names = SPEEDS if metric is None else (metric,)
    others: dict[str, Any] = {}
    for line in reversed(text.splitlines()):
        values = _object(line)
        for name in names:
            if values.get(name) is not None:
                return _checked(name, name, values[name])
        others = others or values
    if metric is None:
        return None
    found = f"its last line of JSON has {', '.join(others)}" if others else "it has no line of JSON"
    raise StartError(f"--metric {metric} is not in the output: {found}")


def _object(line: str) -> dict[str, Any]:
    if "{" not in line:
        return {}
    try:
        value = json.loads(line[line.index("{") :])  # a launcher may prefix the rank
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _checked(source: str, name: str, value: Any) -> tuple[str, float]:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise StartError(f"{source}: found {value!r}, expected a number above 0")
    return name, number


# Comparing


def compare(runs: dict[int, list[Run]]) -> tuple[str, list[Speed]]:
    """Return the metric's name, and the speed at each number of ranks.

    The smallest number of ranks is taken for ideal.

    Raises:
        StartError: some of the runs have told their speed, and others have not.
    """
    names = {run.metric for each in runs.values() for run in each}
    if len(names) > 1:
        raise StartError(
            f"the speed is {' in some runs, and '.join(sorted(names))} in others; print the same "
            "from every run"
        )
    (name,) = names
    means = {number: fmean(run.value for run in each) for number, each in runs.items()}
    first = min(runs)
    table = []
    for number, each in runs.items():
        ratio = means[number] / means[first]
        speedup = first * (1 / ratio if name == WALL else ratio)
        values = [run.value for run in each]
        table.append(
            Speed(
                ranks=number,
                runs=values,
                mean=means[number],
                deviation=stdev(values) if len(values) > 1 else None,
                speedup=speedup,
                efficiency=speedup / number,
                seconds=fmean(run.seconds for run in each),
            )
        )
    return name, table


def describe(document: dict[str, Any], table: Sequence[Speed]) -> str:
    """Return the comparison as text."""
    metric, cores = document["metric"], document["cores"]
    head = "seconds" if metric == WALL else metric
    lines = [f"{'ranks':>5}  {head:>14}  {'deviation':>9}  {'speed-up':>8}  {'efficiency':>10}"]
    for speed in table:
        deviation = "-" if speed.deviation is None else f"{speed.deviation:.4g}"
        lines.append(
            f"{speed.ranks:>5}  {speed.mean:>{max(14, len(head))}.5g}  {deviation:>9}  "
            f"{speed.speedup:>8.2f}  {speed.efficiency:>10.1%}"
        )
    if metric == WALL:
        lines.append(
            f"note: found no {' or '.join(SPEEDS)} in the output; the speed is the wall time, "
            "with the start, of work that must be the same on any number of ranks"
        )
    if table[0].ranks > 1:
        lines.append(f"note: {table[0].ranks} ranks are taken for ideal; add 1 to --np")
    if cores and table[-1].ranks > cores:
        lines.append(f"note: this host has {cores} cores; more ranks than that share them")
    return "\n".join(lines)


def plot(document: dict[str, Any], table: Sequence[Speed], path: Path) -> None:
    """Draw the speed and the efficiency over the number of ranks.

    Raises:
        StartError: the file cannot be written.
    """
    figure, (left, right) = plots.figure(10, 4.2, columns=2)
    ranks = [speed.ranks for speed in table]
    is_wall = document["metric"] == WALL
    values = [speed.speedup if is_wall else speed.mean for speed in table]
    spread = [value * (s.deviation or 0) / s.mean for value, s in zip(values, table, strict=True)]
    low = [value - by for value, by in zip(values, spread, strict=True)]
    high = [value + by for value, by in zip(values, spread, strict=True)]
    unit = "speed-up (by wall time)" if is_wall else document["metric"]
    color = plots.COLORS["hvdlite"]
    measured = plots.Series("measured (mean and standard deviation)", values, low, high, color)
    plots.speed_over_ranks(left, ranks, values[0] / ranks[0], [measured], unit)
    right.axhline(100, linestyle=":", color="black")
    efficiency = [100 * speed.efficiency for speed in table]
    right.plot(ranks, efficiency, "-o", color=color, markersize=4)
    for speed in table:
        right.annotate(
            f"{speed.efficiency:.0%}",
            (speed.ranks, 100 * speed.efficiency),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
        )
    right.set_xticks(ranks, [str(number) for number in ranks])
    right.set_xlabel("ranks")
    right.set_ylabel("efficiency in %")
    right.set_ylim(0, max(110, 105 * max(speed.efficiency for speed in table)))
    right.margins(x=0.12)
    right.grid(alpha=0.3)
    figure.suptitle(Path(document["script"]).name, fontsize="medium")
    plots.save(figure, path)
