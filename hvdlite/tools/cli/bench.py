"""``hvdlite bench``: hvdlite beside the other libraries that are installed."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.errors import StartError
from hvdlite.launch.hosts import choose_hosts
from hvdlite.launch.options import at_least
from hvdlite.tools.bench import job, report
from hvdlite.tools.bench.compression_ranks import CANDIDATES
from hvdlite.tools.bench.workloads import BACKENDS, WORKLOADS
from hvdlite.tools.cli import plots
from hvdlite.tools.cli.arguments import (
    above_zero,
    add_hosts,
    add_plot,
    check_file,
    numbers,
    positive,
)

Record = Mapping[str, Any]

HELP = "measure allreduce, training steps and compression beside DDP, plain MPI and others"
_SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_RANKS = "hvdlite.tools.bench.{}_ranks:measure"
_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
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
batch normalisation; ddp-no-buffers the same without these broadcasts. Where they are named:
ddp-hvdlite, ddp-hook, fsdp and fsdp-hvdlite, DDP and FSDP on gloo and on hvdlite's backend or hook.
"""
_COMPRESSION_EXAMPLES = """\
examples:
  hvdlite bench compression -H node1,node2                    between two hosts
  hvdlite bench compression --models mlp --contenders fp16,powersgd --plot compression.png

Exchanges alone are timed: if the backward pass hides a part of them, there is less to gain.
hvdlite.advise(model), in a script, measures a model of your own.
"""


class Benchmark(NamedTuple):
    """A benchmark: its words on the command line, its contenders, its table and its plot.

    ``table`` yields the lines about the records of one number of ranks, and where they ran.
    """

    description: str
    examples: str
    seconds: float  # for a size or model, unless the user says otherwise
    table: Callable[[Sequence[Record], str], Iterator[str]]
    plot: Callable[[Mapping[str, Any]], Any]
    known: Mapping[str, Sequence[str]]  # the contenders by framework, in the order of the tables
    always: Sequence[str]  # those that all others are compared with
    models: Sequence[str] = ()  # unless the user names others; none: it measures sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hvdlite bench``."""
    parser.description = "Measure hvdlite beside the other libraries that are installed."
    commands = parser.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True
    )
    for name, benchmark in _BENCHMARKS.items():
        description = benchmark.description
        command = commands.add_parser(
            name,
            help=description[0].lower() + description[1:-1],
            description=f"{description} The contenders take turns in the same processes.",
            epilog=benchmark.examples,
        )
        _add_options(command, benchmark)


def _add_options(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    add = parser.add_argument
    if benchmark.models:
        text = f"some of {', '.join(WORKLOADS)} ({', '.join(benchmark.models)})"
        add("--models", type=_models, default=benchmark.models, metavar="NAMES", help=text)
    else:
        add("--sizes", type=_sizes, default=_SIZES, metavar="SIZES", help=f"bytes ({_SIZES})")
        text = "also 400 asynchronous sums of 16 KiB at once"
        add("--burst", action="store_true", help=text)
    add("--np", type=numbers, default=[2], metavar="2,4", help="numbers of ranks (2)")
    add(
        "--framework",
        choices=tuple(benchmark.known),
        help="default: the first of them that is installed",
    )
    names = dict.fromkeys(name for each in benchmark.known.values() for name in each)
    text = f"some of {', '.join(names)} (all that are installed)"
    add("--contenders", type=lambda text: text.split(","), metavar="NAMES", help=text)
    add("--rounds", type=positive, default=200, metavar="N", help="at most (%(default)s)")
    text = "per size or model, about, at most (%(default)g)"
    add("--seconds", type=above_zero, default=benchmark.seconds, metavar="S", help=text)
    text = "processes that compute on each host meanwhile, as those that load data do (0)"
    add("--busy", type=at_least(0), default=0, metavar="N", help=text)
    add_hosts(parser)
    text = "write JSON, with the time of every round; without FILE: print it, and no table"
    add("--json", nargs="?", const="-", metavar="FILE", help=text)
    add_plot(parser)


def _sizes(text: str) -> list[int]:
    sizes = set()
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]iB|B|)", word.strip())
        size = int(match[1]) * report.UNITS[match[2] or "B"] if match else 0
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(
                f"found {word!r}, expected a multiple of the 4 bytes of a float32, as in 65536 or "
                "64KiB"
            )
        sizes.add(size)
    return sorted(sizes)


def _models(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(
                f"found {name!r}, expected some of {', '.join(WORKLOADS)}"
            )
    return list(dict.fromkeys(names))


def main(options: argparse.Namespace) -> int:
    """Run ``hvdlite bench`` and return its exit code."""
    if options.plot:
        plots.check(options.plot)
    if options.json not in (None, "-"):
        check_file("--json", options.json)
    choose_hosts(options.hosts, options.hostfile, max(options.np))
    document = measure(options)
    if options.plot:
        plots.save(_BENCHMARKS[options.benchmark].plot(document), options.plot)
    text = json.dumps(document, indent=2)
    if options.json not in (None, "-"):
        try:
            Path(options.json).write_text(f"{text}\n")
        except OSError as error:
            raise StartError(f"--json {options.json}: {error.strerror}") from None
    print(text if options.json == "-" else "\n".join(describe(document)))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the document that ``--json`` writes."""
    benchmark = options.benchmark
    framework = _choose_framework(benchmark, options.framework)
    names = _choose(benchmark, framework, options.contenders)
    facts = report.machine()
    common = {
        "framework": framework,
        "contenders": names,
        "limit": {"rounds": options.rounds, "seconds": options.seconds, "at_least": 3},
    }
    own: dict[str, Any]
    if _BENCHMARKS[benchmark].models:
        own = {"models": options.models}
        cases = [{"workload": name} for name in options.models]
    else:
        own = {"sizes": options.sizes, "burst": options.burst}
        cases = [own]
    where = {"hosts": options.hosts, "hostfile": options.hostfile}
    notes = []
    if options.busy:
        notes.append(f"processes that computed meanwhile on each host: {options.busy}")
    results: list[Record] = []
    versions: dict[str, str] = {}
    for size in options.np:
        if size > facts["cores"] and not any(where.values()):
            notes.append(f"{size} ranks share the {facts['cores']} cores of this host")
        for case in cases:
            arguments = {**common, **case}
            outcome = job.run(size, _RANKS.format(benchmark), arguments, **where, busy=options.busy)
            results += [{"hosts": outcome.hosts, **record} for record in outcome.result]
            versions |= outcome.versions
    return {
        "benchmark": benchmark,
        "machine": {**facts, "versions": versions},
        "options": {**common, **own, "busy": options.busy},
        "notes": notes,
        "results": results,
    }


def _choose_framework(benchmark: str, asked: str | None) -> str:
    """Return the framework to measure with; without a wish, the first that is installed."""
    names = [asked] if asked else list(_BENCHMARKS[benchmark].known)
    for name in names:
        if find_spec(name) is not None:
            return name
    missing = " and ".join(f"{_TITLES[name]} (pip install 'hvdlite[{name}]')" for name in names)
    raise StartError(f"the {benchmark} benchmark needs {missing}, which cannot be found")


def _choose(benchmark: str, framework: str, asked: Sequence[str] | None) -> list[str]:
    """Return the contenders; without a wish, all that compete."""
    known = _BENCHMARKS[benchmark].known[framework]
    for name in asked or ():
        if name not in known:
            raise StartError(
                f"--contenders: found {name!r}, expected some of {', '.join(known)}, which "
                f"`hvdlite bench {benchmark} --framework {framework}` knows"
            )
    usual = (name for name in known if name not in BACKENDS)
    wanted = {*(usual if asked is None else asked), *_BENCHMARKS[benchmark].always}
    return [name for name in known if name in wanted]


# Tables


def describe(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the tables."""
    records = document["results"]
    for ranks in dict.fromkeys(record["ranks"] for record in records):
        own = [record for record in records if record["ranks"] == ranks]
        hosts = own[0]["hosts"]
        where = f"{report.count_text(ranks, 'rank')} on {report.count_text(hosts, 'host')}"
        yield from _BENCHMARKS[document["benchmark"]].table(own, where)
    yield report.describe(document)
    yield ", ".join(f"{name} {text}" for name, text in document["machine"]["versions"].items())
    yield from (f"note: {note}" for note in document["notes"])


def _sums(records: Sequence[Record], where: str) -> Iterator[str]:
    """Yield a table of times, and one of ratios; a column for each contender."""
    names = list(dict.fromkeys(name for record in records for name in record["seconds"]))
    rows = []
    for record in records:
        medians = {name: report.time_text(s["median"]) for name, s in record["seconds"].items()}
        times = [medians.get(name, "-") for name in names]
        rows.append([_case(record), str(record["rounds"]), *times])
    yield f"Sum of float32 in place, {where}: median time"
    yield report.table(["size", "rounds", *names], rows)
    yield ""
    others = [name for name in names if name != "hvdlite"]
    if others:
        rows = []
        for record in records:
            ratios = [report.ratio_text(record["ratios"].get(name)) for name in others]
            rows.append([_case(record), *ratios])
        yield "Time / hvdlite's within each round: median (10 - 90 %)"
        yield report.table(["size", *others], rows)
        yield ""


def _case(record: Record) -> str:
    size = report.size_text(record["bytes"])
    return f"{record['tensors']} x {size}" if record["case"] == "burst" else size


def _steps(records: Sequence[Record], where: str) -> Iterator[str]:
    """Yield a table for each model; a row for each contender."""
    for record in records:
        yield (
            f"{record['title']} in {record['framework']}, {where}, {record['rounds']} rounds: "
            "median (10 - 90 %)"
        )
        batch = record["ranks"] * record["batch_per_rank"]
        rows = [
            [
                name,
                report.spread_text(seconds),
                f"{batch / seconds['median']:.4g}",
                report.ratio_text(record["ratios"].get(name)),
                report.spread_text(record["overhead_seconds"].get(name)),
            ]
            for name, seconds in record["seconds"].items()
        ]
        headings = ["contender", "step", "samples/s", "step / hvdlite's", "exchange adds"]
        yield report.table(headings, rows)
        shares: dict[str, list[str]] = {}
        for pair, ratio in record["overhead_ratios"].items():
            name, other = pair.split(" / ")
            shares.setdefault(name, []).append(f"{other} {report.ratio_text(ratio)}")
        for name, found in shares.items():
            yield f"{name} adds, of what the others add: {', '.join(found)}"
        yield ""


def _advice(records: Sequence[Record], where: str) -> Iterator[str]:
    for record in records:
        yield f"{record['title']}, {where}, {record['rounds']} rounds: {record['advice']}"
        yield ""


_BENCHMARKS = {
    "allreduce": Benchmark(
        "Time sums of one float32 array over all ranks, in place, by size.",
        _ALLREDUCE_EXAMPLES,
        2.0,
        _sums,
        plots.allreduce,
        {
            "torch": ("hvdlite", "bucket", "mpi", "gloo", "memcpy"),
            "numpy": ("hvdlite", "bucket", "mpi", "memcpy"),
        },
        ["hvdlite"],
    ),
    "training": Benchmark(
        "Time training steps, and how much longer they take with the exchange of gradients.",
        _TRAINING_EXAMPLES,
        20.0,
        _steps,
        plots.models,
        {
            "torch": ("alone", "hvdlite", "mpi", "ddp", "ddp-no-buffers", *BACKENDS),
            "tensorflow": ("alone", "hvdlite", "mpi"),
        },
        ["alone", "hvdlite"],
        models=list(WORKLOADS),
    ),
    "compression": Benchmark(
        "Time exchanges of a model's gradients, and tell which compression pays on these links.",
        _COMPRESSION_EXAMPLES,
        5.0,
        _advice,
        plots.models,
        dict.fromkeys(_TITLES, tuple(CANDIDATES)),
        ["none"],
        models=["resnet"],
    ),
}
