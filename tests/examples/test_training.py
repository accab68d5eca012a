"""The training scripts, from their start to their exit code."""

import importlib.util
import json
import os

import pytest

from tests.examples import idx
from tests.examples.conftest import EXAMPLES
from tests.harness import mpirun, run_script

FRAMEWORKS = {"torch": "pytorch", "tensorflow": "tensorflow"}
MNIST = mpirun.ROOT.parent / "shared" / "data" / "mnist"
TIMEOUT = 120


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request):
    if not _is_installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return FRAMEWORKS[request.param]


def _any_framework():
    """The first framework that is there, where the scripts differ in nothing that matters."""
    found = [name for module, name in FRAMEWORKS.items() if _is_installed(module)]
    return found[0] if found else pytest.skip("neither framework is installed")


def _is_installed(module):
    return importlib.util.find_spec(module) is not None


def _run(framework, size, *arguments, timeout=TIMEOUT):
    script = EXAMPLES / f"{framework}_mnist.py"
    return run_script(script, size, ["--json", *map(str, arguments)], timeout=timeout)


def _train(framework, size, *arguments, timeout=TIMEOUT):
    """Run a script that has to succeed, and return what it reports."""
    job = _run(framework, size, *arguments, timeout=timeout)
    assert job.returncode == 0, job.stderr
    result = json.loads(job.stdout.splitlines()[-1])
    assert job.stdout.count('"weights_sha256"') == 1, "only rank 0 reports"
    assert result["framework"] == framework
    assert result["processes"] == size
    assert result["identical"] is True
    return result


@pytest.fixture(scope="module")
def on_two(framework):
    return _train(framework, 2)


def _check_digits(result):
    assert result["test_accuracy"] >= 0.97
    # An accuracy over 360 images, each counted once.
    assert result["test_accuracy"] * 360 == pytest.approx(round(result["test_accuracy"] * 360))
    assert result["train_loss"] < 0.01
    assert result["images_per_s"] > 0


@pytest.mark.parametrize("size", [1, 4])
def test_digits(framework, size):
    _check_digits(_train(framework, size))


def test_digits_on_two_processes(on_two):
    _check_digits(on_two)


def test_resumed_training_ends_like_an_uninterrupted_one(framework, on_two, tmp_path):
    # 23 steps make an epoch: this one is interrupted in the twenty-first.
    interrupted = _train(framework, 2, "--checkpoint-dir", tmp_path, "--steps", 470)
    assert interrupted["weights_sha256"] != on_two["weights_sha256"]
    resumed = _train(framework, 2, "--checkpoint-dir", tmp_path)
    assert resumed["weights_sha256"] == on_two["weights_sha256"]
    assert resumed["train_loss"] == on_two["train_loss"]
    assert [path.name for path in tmp_path.iterdir()] == [f"{framework}_mnist.npz"]


def test_finished_training_is_evaluated_again(tmp_path):
    arguments = ("--epochs", 1, "--checkpoint-dir", tmp_path)
    first, again = (_train(_any_framework(), 1, *arguments) for _ in range(2))
    assert again["weights_sha256"] == first["weights_sha256"]
    assert again["test_accuracy"] == first["test_accuracy"]
    assert again["train_loss"] is again["images_per_s"] is None


def _check_refusal(job, *words):
    assert job.returncode != 0
    assert job.stdout == ""
    (line,) = [line for line in job.stderr.splitlines() if words[0] in line]
    assert all(word in line for word in words)
    assert "Traceback" not in job.stderr


def test_data_that_cannot_be_used(framework, tmp_path):
    path = idx.write(tmp_path) / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    job = _run(framework, 2, "--data-dir", tmp_path)
    _check_refusal(job, str(path), "truncated", "leave out --data-dir")


def test_damaged_checkpoint(tmp_path):
    framework = _any_framework()
    path = tmp_path / f"{framework}_mnist.npz"
    path.write_bytes(b"PK\x03\x04 and nothing else")
    _check_refusal(_run(framework, 2, "--checkpoint-dir", tmp_path), str(path))
    assert path.read_bytes() == b"PK\x03\x04 and nothing else"


def test_compression():
    result = _train(_any_framework(), 2, "--epochs", 3, "--compression", "bf16")
    assert result["train_loss"] < 1


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no MNIST in {MNIST}")
@pytest.mark.skipif(
    os.environ.get("HVDLITE_TEST_MNIST") != "1", reason="takes minutes: set HVDLITE_TEST_MNIST=1"
)
def test_mnist(framework):
    result = _train(framework, 2, "--data-dir", MNIST, timeout=600)
    assert result["test_accuracy"] >= 0.985
