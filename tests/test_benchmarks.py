"""The benchmarks run and save every figure; the values are not tested."""

import importlib
import json
import sys
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from tests.benchmarks import job, report, statistics
from tests.benchmarks.measurement import order
from tests.harness import hosts
from tests.harness.hosts import why_unavailable


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run a benchmark's command; return its results and what it printed."""

    def run(command, *arguments, name=None, plots=True):
        pytest.importorskip("torch")
        monkeypatch.setattr(job, "SECONDS", 120.0)
        monkeypatch.setattr(sys, "argv", [command, "--output", str(tmp_path), *arguments])
        importlib.import_module(f"tests.benchmarks.{command}").main()
        document = json.loads((tmp_path / f"{name or command}.json").read_text())
        assert document["machine"]["cores"] >= 1
        assert document["machine"]["versions"]["mpi4py"]
        if plots:
            plot = (tmp_path / f"{name or command}.png").read_bytes()
            assert plot.startswith(b"\x89PNG")
        return document["results"], capsys.readouterr().out

    return run


@pytest.mark.slow
def test_allreduce(run):
    records, printed = run("allreduce", "--ranks", "2", "--sizes", "4KiB", "65536", "--rounds", "2")
    assert [(record["case"], record["bytes"]) for record in records] == [
        ("allreduce", 4096),
        ("allreduce", 65536),
        ("burst", 16384),
    ]
    for record in records:
        contenders = {"hvdlite", "mpi", "gloo", "memcpy"}
        ratios = {"gloo / hvdlite", "mpi / hvdlite", "hvdlite / memcpy"}
        if record["case"] == "allreduce":
            contenders.add("hvdlite bucket")
        assert set(record["seconds"]) - {"horovod"} == contenders
        assert ratios <= set(record["ratios"])
        assert record["rounds"] == 2
        assert all(0 < time["p10"] <= time["p90"] for time in record["seconds"].values())
    assert "400 x 16 KiB" in printed


@pytest.mark.slow
def test_training(run):
    (record,), printed = run("training", "--models", "layers", "--rounds", "2")
    others = {"horovod", "ddp, no buffers"}
    assert set(record["seconds"]) - others == {"alone", "hvdlite", "ddp"}
    assert set(record["overhead_seconds"]) - others == {"hvdlite", "ddp"}
    assert "hvdlite / ddp" in record["overhead_ratios"]
    assert "200 small layers" in printed


@pytest.mark.slow
def test_training_with_tensorflow(run):
    pytest.importorskip("tensorflow")
    arguments = ("--framework", "tensorflow", "--models", "resnet", "--rounds", "1")
    (record,), _ = run("training", *arguments, name="training-tensorflow")
    assert set(record["seconds"]) - {"horovod"} == {"alone", "hvdlite"}
    assert set(record["overhead_seconds"]) - {"horovod"} == {"hvdlite"}


@pytest.mark.slow
def test_scaling(run):
    arguments = ("--ranks", "2", "--batch", "2", "--steps", "1", "--rounds", "1")
    records, _ = run("scaling", *arguments)
    assert [record["processes"] for record in records] == [1, 2]
    for record in records:
        assert set(record["images_per_second"]) == {"hvdlite", "alone"}
        assert record["efficiency"]["median"] == pytest.approx(
            record["speedup"]["median"] / record["processes"]
        )


@pytest.mark.slow
def test_compression(run, tmp_path):
    pytest.importorskip("sklearn")
    names = ["fp16", "PowerSGD, rank 4"]
    arguments = ("--quick", "--strategies", *names, "--mnist", str(tmp_path / "nothing"))
    records, printed = run("compression", *arguments, plots=False)
    assert [record["strategy"] for record in records] == ["one process", *names]
    for record in records:
        (accuracy,) = record["accuracy"]["digits"]
        assert 0.2 < accuracy <= 1.0
    for record, least in zip(records[1:], (1.9, 30), strict=True):
        assert least < record["compression"] < 1.2 * least
        assert 0 < record["one_core"]["peak"] < 2
        seconds = (*record["all_ranks"].values(), *map(record["one_core"].get, ("encode", "alone")))
        assert all(time["median"] > 0 for time in seconds)
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 5
    assert "without MNIST" in printed


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_slow_link(run):
    names = ("none", "PowerSGD, rank 4")
    arguments = ("--strategies", *names, "--rounds", "1", "--rate", "1e9")
    records, printed = run("slow_link", *arguments, plots=False)
    assert [record["strategy"] for record in records] == list(names)
    for record in records:
        assert record["seconds"]["median"] > 0
        assert f"| {record['strategy']} |" in printed
    assert records[0]["speedup"]["median"] == 1.0
    assert records[0]["bytes_per_step"] > 50 * records[1]["bytes_per_step"]
    assert "1000 Mbit/s" in printed


def test_a_slow_link_that_cannot_be_made(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hosts, "why_unavailable", lambda: "the reason")
    monkeypatch.setattr(sys, "argv", ["slow_link", "--output", str(tmp_path)])
    importlib.import_module("tests.benchmarks.slow_link").main()
    assert capsys.readouterr().out == "nothing measured: the reason\n"
    assert not list(tmp_path.iterdir())


def test_a_job_that_fails(capfd):
    with pytest.raises(RuntimeError, match=r"training_ranks:measure on 1 ranks ended with exit"):
        job.run(1, "tests.benchmarks.training_ranks:measure", {"no_such": 1})
    assert "no_such" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize(
    ("workload", "tensors", "elements"),
    [("layers", 400, 828_490), ("resnet", 62, 11_173_962), ("mlp", 10, 49_999_894)],
)
def test_models(framework, workload, tensors, elements):
    pytest.importorskip(framework)
    models = importlib.import_module(f"tests.benchmarks.{framework}_models")
    model = models.build(workload)
    weights = list(model.parameters()) if framework == "torch" else model.trainable_variables
    assert len(weights) == tensors
    assert sum(np.prod(tuple(weight.shape)) for weight in weights) == elements


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_each_has_each_place_equally_often(count):
    rounds = [order(count, turn) for turn in range(2 * count)]
    for place in range(count):
        assert sorted(row[place] for row in rounds) == sorted(2 * list(range(count)))
    if count > 2:
        assert len({before for row in rounds for before, after in pairwise(row) if after == 0}) == 2


def test_overheads_are_differences_within_a_round():
    alone = np.array([1.0, 5.0, 3.0])
    assert statistics.overhead(alone + np.array([0.5, 0.5, 0.7]), alone)["median"] == pytest.approx(
        0.5
    )
    ratio = statistics.overhead_ratio(alone + 0.5, alone + 2, alone)
    assert ratio == pytest.approx({"median": 0.25, "p10": 0.25, "p90": 0.25})
    assert statistics.ratio(2 * alone, alone)["median"] == 2
    spread = statistics.summary(np.arange(11.0))
    assert spread == pytest.approx({"median": 5.0, "p10": 1.0, "p90": 9.0})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.7e-7, "0.87 us"), (1.234e-3, "1.23 ms"), (-0.0123, "-12.3 ms"), (126.4, "126 s")],
)
def test_times_for_people(seconds, text):
    assert report.time_text(seconds) == text


def test_sizes_for_people():
    assert [report.size_text(size) for size in (12, 4096, 3 * 2**20)] == ["12 B", "4 KiB", "3 MiB"]


@pytest.mark.slow
def test_replicas():
    pytest.importorskip("torch")
    from tests.benchmarks import replicas

    model = replicas.resnet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    check, step = replicas.compare(model, batch=2, side=32, rounds=1)
    assert check > 0
    assert step > 0
