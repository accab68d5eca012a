"""The benchmarks run and save every figure; the values are not tested."""

import importlib
import json
import sys

import pytest

pytest.importorskip("matplotlib")

from tests.benchmarks import files, training
from tests.harness import hosts
from tests.harness.hosts import why_unavailable


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run a benchmark's command; return its results and what it printed."""

    def run(command, *arguments, plots=True):
        pytest.importorskip("torch")
        monkeypatch.setattr(sys, "argv", [command, "--output", str(tmp_path), *arguments])
        importlib.import_module(f"tests.benchmarks.{command}").main()
        document = json.loads((tmp_path / f"{command}.json").read_text())
        assert document["machine"]["cores"] >= 1
        assert document["machine"]["revision"]
        assert document["machine"]["versions"]["mpi4py"]
        if plots:
            plot = (tmp_path / f"{command}.png").read_bytes()
            assert plot.startswith(b"\x89PNG")
        return document["results"], capsys.readouterr().out

    return run


@pytest.mark.slow
def test_allreduce(run):
    records, printed = run("allreduce", "--np", "2", "--sizes", "4KiB,65536", "--rounds", "2")
    assert [(record["case"], record["bytes"], record["tensors"]) for record in records] == [
        ("allreduce", 4096, 1),
        ("allreduce", 65536, 1),
        ("burst", 16384, 400),
    ]
    for record in records:
        contenders = {"hvdlite", "mpi", "gloo", "memcpy"}
        if record["case"] == "allreduce":
            contenders.add("bucket")
        assert set(record["seconds"]) - {"horovod"} == contenders
        assert record["rounds"] == 2
    assert "400 x 16 KiB" in printed


def test_the_figure_of_the_readme(monkeypatch, tmp_path):
    spread = {"alone": 0.1, "hvdlite": 0.105, "ddp": 0.12}
    record = {
        "title": "ResNet-18, 32x32, batch 8",
        "seconds": {name: {"median": value} for name, value in spread.items()},
        "overhead_seconds": {"hvdlite": {"median": 0.005}, "ddp": {"median": 0.02}},
    }
    document = {"options": {"contenders": [*spread]}, "results": [record]}
    monkeypatch.setattr(files, "bench", lambda *words: (document, tmp_path))
    training.main()
    figure = (tmp_path / "step_overhead.svg").read_text()
    assert "DDP on gloo  +20 %" in figure
    assert "hvdlite  +5 %" in figure


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


@pytest.mark.slow
def test_replicas():
    pytest.importorskip("torch")
    from tests.benchmarks import replicas

    cost = replicas.measure("layers", batch=2, count=3)
    assert min(*cost.slices, cost.all, *cost.steps) > 0
    assert 1 < cost.rotation <= 512
    assert cost.nbytes > 1000
