"""``hvdlite bench``: hvdlite beside the other libraries that are installed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.errors import StartError
from hvdlite.launch.hosts import choose_hosts
from hvdlite.tools.bench import contenders, job, report
from hvdlite.tools.bench.workloads import WORKLOADS
from hvdlite.tools.cli import plots
from hvdlite.tools.cli.arguments import add_hosts, add_plot, numbers, positive

HELP = "measure allreduce, training steps and compression beside DDP, plain MPI and others"
_SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_RANKS = "hvdlite.tools.bench.{}_ranks:measure"
EXAMPLES = """\
examples:
  hvdlite bench allreduce --plot allreduce.png
  hvdlite bench training --models resnet --plot training.pdf
  hvdlite bench compression -H node1,node2

`hvdlite bench allreduce --help` and the like have the options.
"""
_ALLREDUCE_EXAMPLES = """\
examples:
  hvdlite bench allreduce                                     on two ranks of this host
  hvdlite bench allreduce --np 2,4 --plot allreduce.png
  hvdlite bench allreduce --sizes 1MiB,64MiB --contenders mpi,gloo --json
  hvdlite bench allreduce --np 8 -H node1:4,node2:4 --json allreduce.json

hvdlite is hvd.allreduce_ of a tensor, bucket the exchange of a gradient bucket, mpi MPI_Allreduce
by mpi4py, gloo PyTorch's backend, memcpy a copy of as many bytes on every rank at once.
"""
_TRAINING_EXAMPLES = """\
examples:
  hvdlite bench training                                      on two ranks of this host
  hvdlite bench training --models resnet,mlp --plot training.png
  hvdlite bench training --framework tensorflow --json training.json
  hvdlite bench training --models layers --contenders mpi,ddp

alone is the step without an exchange, on all ranks at once; mpi an MPI_Allreduce of each gradient
after the backward pass; ddp DistributedDataParallel on gloo, which also broadcasts the buffers of
batch normalisation; ddp-no-buffers the same without these broadcasts.
"""
_COMPRESSION_EXAMPLES = """\
examples:
  hvdlite bench compression -H node1,node2                    between two hosts
  hvdlite bench compression --models mlp --contenders fp16,powersgd --plot compression.png

Exchanges alone are timed: if the backward pass hides a part of them, there is less to gain.
hvdlite.advise(model), in a script, measures a model of your own.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite bench``."""
    parser.description = "Measure hvdlite beside the other libraries that are installed."
    commands = parser.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True
    )
    allreduce = _add(
        commands,
        "allreduce",
        "Time sums of one float32 array over all ranks, in place, by size.",
        _ALLREDUCE_EXAMPLES,
    )
    allreduce.add_argument(
        "--sizes", type=_sizes, default=_sizes(_SIZES), metavar="SIZES", help=f"bytes ({_SIZES})"
    )
    allreduce.add_argument(
        "--burst", action="store_true", help="also 400 asynchronous sums of 16 KiB at once"
    )
    _add_common(allreduce, "allreduce", seconds=2.0)
    training = _add(
        commands,
        "training",
        "Time training steps, and how much longer they take with the exchange of gradients.",
        _TRAINING_EXAMPLES,
    )
    _add_common(training, "training", seconds=20.0, models=list(WORKLOADS))
    compression = _add(
        commands,
        "compression",
        "Time exchanges of a model's gradients, and tell which compression pays on these links.",
        _COMPRESSION_EXAMPLES,
    )
    _add_common(compression, "compression", seconds=5.0, models=["resnet"])


def _add(commands: Any, name: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description[0].lower() + description[1:-1],
        description=f"{description} The contenders take turns in the same processes.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def _add_common(
    parser: argparse.ArgumentParser, benchmark: str, seconds: float, models: Sequence[str] = ()
) -> None:
    known = contenders.KNOWN[benchmark]
    names = dict.fromkeys(name for each in known.values() for name in each)
    add = parser.add_argument
    if models:
        text = f"some of {', '.join(WORKLOADS)} ({', '.join(models)})"
        add("--models", type=_models, default=models, metavar="NAMES", help=text)
    add("--np", type=numbers, default=[2], metavar="2,4", help="numbers of ranks (2)")
    add("--framework", choices=tuple(known), help="default: the first of them that is installed")
    add(
        "--contenders",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help=f"some of {', '.join(names)} (all that are installed)",
    )
    add("--rounds", type=positive, default=200, metavar="N", help="at most (%(default)s)")
    add(
        "--seconds",
        type=_seconds,
        default=seconds,
        metavar="S",
        help="per size or model, about, at most (%(default)g)",
    )
    add_hosts(parser)
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON, with the time of every round; without FILE: print it, and no table",
    )
    add_plot(parser)


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        try:
            size = report.parse_size(word.strip())
        except ValueError:
            size = 0
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(
                f"found {word!r}, expected a multiple of the 4 bytes of a float32, as in 65536 or "
                "64KiB"
            )
        sizes.append(size)
    return sorted(set(sizes))


def _models(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(
                f"found {name!r}, expected some of {', '.join(WORKLOADS)}"
            )
    return list(dict.fromkeys(names))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number above 0")
    return seconds


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite bench`` and return its exit code.

    Raises:
        StartError: a mistake on the command line, something is not installed, or a rank failed.
    """
    _check_files(options)
    choose_hosts(options.hosts, options.hostfile, max(options.np))
    document = measure(options)
    if options.plot:
        draw = plots.allreduce if options.benchmark == "allreduce" else plots.models
        plots.save(draw(document), options.plot)
    text = json.dumps(document, indent=2)
    if options.json == "-":
        print(text)
        return 0
    if options.json is not None:
        try:
            Path(options.json).write_text(f"{text}\n")
        except OSError as error:
            raise StartError(f"--json {options.json}: {error.strerror}") from None
    print("\n".join(describe(document)))
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Refuse files that could not be written in the end."""
    if options.plot:
        plots.check(options.plot)
    if options.json not in (None, "-"):
        path = Path(options.json)
        if path.is_dir() or not path.parent.is_dir():
            found = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise StartError(f"--json {path}: {found}; name a file in a folder that exists")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the document that ``--json`` writes."""
    benchmark = options.benchmark
    framework = contenders.choose_framework(benchmark, options.framework)
    names, remark = contenders.choose(benchmark, framework, options.contenders)
    facts = report.machine()
    is_sum = benchmark == "allreduce"
    cases: list[dict[str, Any]] = (
        [{"sizes": options.sizes, "burst": options.burst}]
        if is_sum
        else [{"workload": name} for name in options.models]
    )
    common = {
        "framework": framework,
        "contenders": names,
        "limit": {"rounds": options.rounds, "seconds": options.seconds, "at_least": 3},
    }
    results: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for size in options.np:
        for case in cases:
            outcome = job.run(
                size,
                _RANKS.format(benchmark),
                {**common, **case},
                hosts=options.hosts,
                hostfile=options.hostfile,
            )
            results += [{"hosts": outcome.hosts, **record} for record in outcome.result]
            versions |= outcome.versions
    is_local = not (options.hosts or options.hostfile)
    return {
        "benchmark": benchmark,
        "machine": {**facts, "versions": versions},
        "options": {**common, **(cases[0] if is_sum else {"models": options.models})},
        "notes": [*([remark] if remark else []), *_crowded(options.np, facts["cores"], is_local)],
        "results": results,
    }


def _crowded(sizes: Sequence[int], cores: int, is_local: bool) -> Iterator[str]:
    for size in sizes:
        if is_local and size > cores:
            yield f"{size} ranks share the {cores} cores of this host"


# Tables


def describe(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the tables."""
    records = document["results"]
    for ranks in dict.fromkeys(record["ranks"] for record in records):
        own = [record for record in records if record["ranks"] == ranks]
        hosts = own[0]["hosts"]
        where = f"{report.count_text(ranks, 'rank')} on {report.count_text(hosts, 'host')}"
        yield from _TABLES[document["benchmark"]](own, where)
    yield report.describe(document)
    yield ", ".join(f"{name} {text}" for name, text in document["machine"]["versions"].items())
    yield from (f"note: {note}" for note in document["notes"])


def _sums(records: Sequence[Mapping[str, Any]], where: str) -> Iterator[str]:
    """Yield a table of times, and one of ratios; a column for each contender."""
    names = list(dict.fromkeys(name for record in records for name in record["seconds"]))
    others = [name for name in names if name != "hvdlite"]
    yield f"Sum of float32 in place, {where}: median time"
    rows = []
    for record in records:
        times = [record["seconds"].get(name) for name in names]
        texts = ["-" if time is None else report.time_text(time["median"]) for time in times]
        rows.append([_case(record), str(record["rounds"]), *texts])
    yield report.table(["size", "rounds", *names], rows)
    yield ""
    if not others:
        return
    yield "Time / hvdlite's within each round: median (10 - 90 %)"
    rows = []
    for record in records:
        ratios = [record["ratios"].get(name) for name in others]
        texts = ["-" if ratio is None else report.ratio_text(ratio) for ratio in ratios]
        rows.append([_case(record), *texts])
    yield report.table(["size", *others], rows)
    yield ""


def _case(record: Mapping[str, Any]) -> str:
    size = report.size_text(record["bytes"])
    return f"{record['tensors']} x {size}" if record["case"] == "burst" else size


def _steps(records: Sequence[Mapping[str, Any]], where: str) -> Iterator[str]:
    """Yield a table for each model; a row for each contender."""
    for record in records:
        yield (
            f"{record['title']} in {record['framework']}, {where}, {record['rounds']} rounds: "
            "median (10 - 90 %)"
        )
        rows = []
        batch = record["ranks"] * record["batch_per_rank"]
        for name, seconds in record["seconds"].items():
            ratio = record["ratios"].get(name)
            added = record["overhead_seconds"].get(name)
            rows.append(
                [
                    name,
                    report.spread_text(seconds),
                    f"{batch / seconds['median']:.4g}",
                    "-" if ratio is None else report.ratio_text(ratio),
                    "-" if added is None else report.spread_text(added),
                ]
            )
        headings = ["contender", "step", "samples/s", "step / hvdlite's", "exchange adds"]
        yield report.table(headings, rows)
        shares = {
            name.removeprefix("hvdlite / "): report.ratio_text(ratio)
            for name, ratio in record["overhead_ratios"].items()
        }
        if shares:
            yield "hvdlite adds, of what the others add: " + ", ".join(
                f"{name} {text}" for name, text in shares.items()
            )
        yield ""


def _advice(records: Sequence[Mapping[str, Any]], where: str) -> Iterator[str]:
    for record in records:
        yield f"{record['title']}, {where}, {record['rounds']} rounds: {record['advice']}"
        yield ""


_TABLES = {"allreduce": _sums, "training": _steps, "compression": _advice}
