"""``hvdlite bench``: its numbers agree with each other, and each mistake takes one line."""

import json
import sys

import numpy as np
import pytest

from hvdlite.tools.bench import job
from hvdlite.tools.bench.workloads import WORKLOADS
from hvdlite.tools.cli import bench
from hvdlite.tools.cli.main import main

NUMPY = ("allreduce", "--framework", "numpy")
FRAMEWORKS = ["torch", "tensorflow"]


def refused(capsys, *words):
    """Return the exit code and the last line of a command that prints no result."""
    try:
        code = main(["bench", *map(str, words)])
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert "Traceback" not in output.err
    return code, lines[-1]


def check(record, than="hvdlite"):
    """Check that the numbers of a record follow from its samples."""
    samples = {name: np.array(times) for name, times in record["samples"].items()}
    for name, times in samples.items():
        assert len(times) == record["rounds"]
        assert (times > 0).all()
        found = record["seconds"][name]
        assert found["median"] == pytest.approx(np.median(times))
        assert found["p10"] <= found["median"] <= found["p90"]
    assert set(record["ratios"]) == set(samples) - {than}
    for name, ratio in record["ratios"].items():
        assert ratio["median"] == pytest.approx(np.median(samples[name] / samples[than]))


@pytest.mark.slow
def test_sums_of_numpy_arrays(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    words = ("--sizes", "64KiB,12", "--burst", "--rounds", 3, "--seconds", 0.3)
    assert (
        main(["bench", *NUMPY, *map(str, words), "--json", str(result), "--plot", str(plot)]) == 0
    )
    document = json.loads(result.read_text())
    cases = [(12, 1), (65536, 1), (16384, 400)]
    records = document["results"]
    assert [(record["bytes"], record["tensors"]) for record in records] == cases
    for record in records:
        check(record)
        assert (record["ranks"], record["hosts"], record["dtype"]) == (2, 1, "float32")
        contenders = ["hvdlite", *(["bucket"] if record["tensors"] == 1 else []), "mpi", "memcpy"]
        assert list(record["seconds"]) == contenders
        assert record["rounds"] == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not is_empty(plot)
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0] == "Sum of float32 in place, 2 ranks on 1 host: median time"
    assert lines[1].split() == ["size", "rounds", "hvdlite", "bucket", "mpi", "memcpy"]
    assert lines[2].split()[:3] == ["12", "B", "3"]
    assert lines[4].startswith("400 x 16 KiB  ")
    assert (
        f"hvdlite {document['machine']['versions']['hvdlite']}, numpy {np.__version__}" in lines[-1]
    )
    assert "64 KiB on 2 ranks" in output.err


def is_empty(path):
    from matplotlib import image

    pixels = image.imread(path)
    return len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) < 10


def test_json_on_standard_output(capsys):
    words = ("--np", "1", "--sizes", "4", "--rounds", "1", "--contenders", "memcpy", "--json")
    assert main(["bench", *NUMPY, *words]) == 0
    (record,) = json.loads(capsys.readouterr().out)["results"]
    assert list(record["seconds"]) == ["hvdlite", "memcpy"]
    assert record["ranks"] == 1


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["allreduce", "--np", "0"], "argument --np: found '0', expected numbers of ranks"),
            (["allreduce", "--sizes", "1KiB,5"], "found '5', expected a multiple of the 4 bytes"),
            (["allreduce", "--framework", "jax"], "argument --framework: invalid choice: 'jax'"),
            (["allreduce", "--seconds", "nan"], "found 'nan', expected a number above 0"),
            (["allreduce", "--rounds", "0"], "found '0', expected a number from 1 on"),
            (["training", "--models", "vgg"], "found 'vgg', expected some of layers, resnet, mlp"),
            ([*NUMPY, "--contenders", "mpi,gloo"], "found 'gloo', expected some of hvdlite, buck"),
            ([*NUMPY, "--np", "4", "-H", "localhost:2"], "-np 4 is more than the 2 slots of local"),
            ([*NUMPY, "--plot", "plot.gif"], "--plot plot.gif: expected a name that ends in .png"),
            ([*NUMPY, "--json", "gone/x.json"], "--json gone/x.json: there is no folder gone"),
            (["alltoall"], "argument BENCHMARK: invalid choice: 'alltoall'"),
            ([], "the following arguments are required: BENCHMARK"),
        ],
    )
    def test_on_the_command_line(self, capsys, monkeypatch, words, message):
        monkeypatch.setattr(job, "run", None)  # it must not come to that
        code, line = refused(capsys, *words)
        assert code == 2
        assert message in line

    @pytest.mark.parametrize(
        ("missing", "words", "message"),
        [
            (FRAMEWORKS, "training", "needs PyTorch (pip install 'hvdlite[torch]') and TensorFlow"),
            (FRAMEWORKS, "allreduce --framework torch", "needs PyTorch (pip install 'hvdlite["),
            (["matplotlib"], "allreduce --framework numpy --plot x.png", "install hvdlite[cli]`"),
        ],
    )
    def test_what_is_not_installed(self, capsys, monkeypatch, missing, words, message):
        for name in missing:
            monkeypatch.setitem(sys.modules, name, None)
        code, line = refused(capsys, *words.split())
        assert code == 2
        assert message in line

    def test_a_rank_that_fails(self, capsys, monkeypatch):
        """The function on the ranks raises; its exception becomes the line."""
        monkeypatch.setattr(bench, "_RANKS", "hvdlite.tools.bench.{}_ranks:gone")
        code, line = refused(capsys, *NUMPY, "--np", "1")
        assert code == 1
        assert line.startswith("hvdlite bench: the job of 1 rank failed: rank 0: AttributeError: ")


@pytest.mark.slow
class TestTraining:
    @pytest.mark.parametrize(
        ("framework", "model", "contenders"),
        [
            ("torch", "layers", ["alone", "hvdlite", "mpi", "ddp"]),
            ("tensorflow", "mlp", ["alone", "hvdlite", "mpi"]),
        ],
    )
    def test_steps(self, capsys, monkeypatch, framework, model, contenders):
        pytest.importorskip(framework)
        monkeypatch.setattr(bench, "_RANKS", "tests.tools.cli.small_{}_ranks:measure")
        words = ("--models", model, "--framework", framework, "--rounds", "2", "--json")
        assert main(["bench", "training", *words]) == 0
        document = json.loads(capsys.readouterr().out)
        (record,) = document["results"]
        check(record)
        assert [*record["seconds"]] == contenders
        samples = {name: np.array(times) for name, times in record["samples"].items()}
        for name, added in record["overhead_seconds"].items():
            differences = samples[name] - samples["alone"]
            assert added["median"] == pytest.approx(np.median(differences))
        assert document["machine"]["versions"][framework]
        text = "\n".join(bench.describe(document))
        assert f"{WORKLOADS[model].title} in {framework}, 2 ranks on 1 host, 2 rounds" in text


@pytest.mark.slow
def test_compression(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    words = ("--framework", "torch", "--json", str(result), "--plot", str(plot))
    assert main(["bench", "compression", *words, "--rounds", "3"]) == 0
    (record,) = json.loads(result.read_text())["results"]
    check(record, "none")
    assert list(record["seconds"]) == ["none", "bf16", "fp16", "blockwise8", "powersgd", "topk"]
    assert record["bytes"] == 4 * 11_173_962
    assert not is_empty(plot)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "gradients of ResNet-18, 32x32, batch 8 in torch, 2 ranks on 1 host, 3"
    )
    assert "2 ranks, 44.7 MB of gradients in a step; a rank sends" in lines[0]
    assert lines[2].endswith("1.00 x as fast")
    assert lines[8] == "use no compression: on these links it costs more than it saves"


@pytest.mark.slow
class TestContenders:
    """One that fails is named."""

    def measure(self, capsys, monkeypatch, fault):
        pytest.importorskip("torch")
        monkeypatch.setattr(bench, "_RANKS", "tests.tools.cli.faulty_{}_ranks:measure_" + fault)
        words = ("--sizes", "4KiB", "--rounds", "1", "--contenders", "gloo")
        return refused(capsys, "allreduce", *words)

    def test_that_is_wrong(self, capsys, monkeypatch):
        code, line = self.measure(capsys, monkeypatch, "wrong")
        assert code == 1
        assert "gloo failed: RuntimeError: a sum of 4096 bytes has 1.0, expected 3.0" in line

    def test_that_kills_a_rank(self, capsys, monkeypatch):
        code, line = self.measure(capsys, monkeypatch, "killed")
        assert code == 1
        assert "rank 1 on host" in line
        assert "SIGKILL" in line
