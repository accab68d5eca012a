"""The training scripts, from their start to their exit code."""

import os

import pytest

from tests.examples import idx, scripts
from tests.harness import mpirun

MNIST = mpirun.ROOT.parent / "shared" / "data" / "mnist"


@pytest.fixture(params=["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def framework(request):
    pytest.importorskip(request.param)
    return {"torch": "pytorch"}.get(request.param, request.param)


@pytest.mark.slow
def test_training_and_resuming_it(framework, tmp_path):
    """A training learns digits; an interrupted one ends like one that is not."""
    folder = ("--checkpoint-dir", tmp_path)
    # 23 steps make an epoch: the second training is interrupted in the second one.
    whole, interrupted, resumed, finished, compressed = scripts.train_in_turn(
        f"{framework}_mnist.py",
        2,
        ("--epochs", 4),
        ("--epochs", 4, *folder, "--steps", 40),
        *[("--epochs", 4, *folder)] * 2,
        ("--epochs", 3, "--compression", "bf16"),
    )
    assert whole["framework"] == framework
    assert whole["test_accuracy"] >= 0.9
    # An accuracy over 360 images, each counted once.
    assert whole["test_accuracy"] * 360 == pytest.approx(round(whole["test_accuracy"] * 360))
    assert whole["train_loss"] < 0.5
    assert whole["images_per_s"] > 0
    assert interrupted["weights_sha256"] != whole["weights_sha256"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["train_loss"] == whole["train_loss"]
    # A finished training is evaluated again.
    assert finished["weights_sha256"] == resumed["weights_sha256"]
    assert finished["test_accuracy"] == resumed["test_accuracy"]
    assert finished["train_loss"] is finished["images_per_s"] is None
    assert [path.name for path in tmp_path.iterdir()] == [f"{framework}_mnist.npz"]
    assert compressed["weights_sha256"] != whole["weights_sha256"]
    assert compressed["train_loss"] < 1


@pytest.mark.slow
def test_fit_of_keras(tmp_path):
    pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    arguments = ("--epochs", 4, "--checkpoint-dir", tmp_path)
    (result,) = scripts.train_in_turn("keras_digits.py", 2, arguments)
    assert result["framework"] == "keras on tensorflow"
    assert result["test_accuracy"] >= 0.9
    # An accuracy over 360 images, each counted once.
    assert result["test_accuracy"] * 360 == pytest.approx(round(result["test_accuracy"] * 360))
    assert [path.name for path in tmp_path.iterdir()] == ["keras_digits.keras"]


def _check_refusal(job, *words):
    assert job.returncode != 0
    assert job.stdout == ""
    (line,) = [line for line in job.stderr.splitlines() if words[0] in line]
    assert all(word in line for word in words)
    assert "Traceback" not in job.stderr


@pytest.mark.slow
def test_data_that_cannot_be_used(tmp_path):
    pytest.importorskip("torch")
    path = idx.write(tmp_path) / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    job = scripts.run("pytorch_mnist.py", 2, "--data-dir", tmp_path)
    _check_refusal(job, str(path), "truncated", "leave out --data-dir")


@pytest.mark.slow
def test_damaged_checkpoint(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "pytorch_mnist.npz"
    path.write_bytes(b"PK\x03\x04 and nothing else")
    job = scripts.run("pytorch_mnist.py", 2, "--checkpoint-dir", tmp_path)
    _check_refusal(job, str(path))
    assert path.read_bytes() == b"PK\x03\x04 and nothing else"


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no MNIST in {MNIST}")
@pytest.mark.skipif(
    os.environ.get("HVDLITE_TEST_MNIST") != "1", reason="takes minutes: set HVDLITE_TEST_MNIST=1"
)
def test_mnist(framework):
    result = scripts.train(f"{framework}_mnist.py", 2, "--data-dir", MNIST, timeout=600)
    assert result["test_accuracy"] >= 0.985
